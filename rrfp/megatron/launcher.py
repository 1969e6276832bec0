"""`python -m rrfp [--cpu] SCRIPT ...`: an unmodified Megatron script, with this package's flags."""

import functools
import os
import runpy
import sys

from rrfp.comm.ports import reserve_port
from rrfp.errors import ConfigurationError
from rrfp.megatron import add_arguments, check_parsed, install_from_args

USAGE = """\
usage: torchrun --nproc-per-node N -m rrfp [--cpu] SCRIPT [SCRIPT'S ARGUMENTS] [--pipeline-schedule rrfp ...]
       rrfp doctor | rrfp balance ... | rrfp trace DIR | rrfp simulate ... | rrfp --version

Runs a Megatron-LM training script (pretrain_gpt.py, ...) with the flags of RRFP added to its own.
  --cpu   train on the CPU (gloo); for trying things out where there is no GPU"""


def launch(argv: list[str]) -> int:
    """Run the script named in `argv`. Returns the exit status of a refusal; a script that ends well returns 0."""
    cpu = False
    while argv and argv[0].startswith("-"):
        option = argv.pop(0)
        if option in ("-h", "--help"):
            print(USAGE)
            return 0
        if option != "--cpu":
            return _refuse(f"{option}: unknown option before the script; see `python -m rrfp --help`")
        cpu = True
    if not argv:
        print(USAGE, file=sys.stderr)
        return 2
    script = argv[0]
    if not os.path.isfile(script):
        return _refuse(f"{script}: no such script; give the path of a training script such as pretrain_gpt.py")
    _one_process_without_torchrun()
    try:
        sys.argv = argv
        _prepare(script, cpu=cpu)
        runpy.run_path(script, run_name="__main__")
    except ConfigurationError as error:
        return _refuse(str(error))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            # No hook of the interpreter sees this one, and the others would wait.
            from rrfp.megatron.runtime import tell_all

            tell_all(stop)
        raise
    return 0


def _one_process_without_torchrun() -> None:
    """Started by hand, this is a job of one process: what torchrun would set for it."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    print("[rrfp] RANK is not set: running as one process; start several with torchrun --nproc-per-node N -m rrfp ...", file=sys.stderr)
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "MASTER_PORT" not in os.environ:
        single["MASTER_PORT"] = str(reserve_port())
    for name, value in single.items():
        os.environ.setdefault(name, value)


def _prepare(script: str, *, cpu: bool) -> None:
    """Everything that has to be in place before the script's first line. Megatron is imported from beside the script if it is there."""
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if cpu:
        from rrfp.megatron import cpu as cpu_mode

        cpu_mode.enable()
    else:
        from rrfp.megatron import _check_device

        _check_device(False)
    try:
        from megatron.training import arguments
    except ImportError as error:
        raise ConfigurationError(
            f"megatron.training can't be imported ({error}): run from a Megatron-LM checkout, or pip install 'megatron-core>=0.17.1,<0.20'"
        ) from error
    from rrfp.megatron.compatibility import check_megatron

    check_megatron()
    if cpu:
        cpu_mode.patch_megatron()
    _add_flags(arguments)


def _add_flags(arguments) -> None:
    """Add the flags where Megatron builds its parser, and act on them when it has validated its arguments."""
    add, parse, validate = arguments.add_megatron_arguments, arguments.parse_args, arguments.validate_args

    @functools.wraps(add)
    def add_megatron_arguments(parser):
        return add_arguments(add(parser))

    @functools.wraps(validate)
    def validate_args(args, *rest, **kwargs):
        result = validate(args, *rest, **kwargs)
        install_from_args(args)
        return result

    @functools.wraps(parse)
    def parse_args(*rest, **kwargs):
        args = parse(*rest, **kwargs)
        check_parsed(args)
        return args

    arguments.add_megatron_arguments = add_megatron_arguments
    arguments.parse_args = parse_args
    arguments.validate_args = validate_args
    # 0.17.1 binds its own copy of the name.
    initialize = sys.modules.get("megatron.training.initialize")
    if initialize is not None and getattr(initialize, "validate_args", None) is validate:
        initialize.validate_args = validate_args


def _refuse(line: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"rrfp: {line}", file=sys.stderr, flush=True)
    return 2
