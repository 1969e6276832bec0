"""The training script of the fault tests: scripts/pretrain_gpt.py, with one fault at one place on one rank.

RRFP_TEST_FAULT holds {"rank", "what", "where", "call", "microbatch", "mark"} as JSON; the moment of the fault (time.monotonic(),
one clock for all processes of a machine) is written to the file `mark`. A list of such has one for each start by torchrun.
"""

import functools
import gc
import itertools
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py")


def mark(fault):
    Path(fault["mark"]).write_text(repr(time.monotonic()))


def strike(fault):
    mark(fault)
    match fault["what"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("a fault on purpose")
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(3)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "block":
            threading.Event().wait(300)


def before(owner, name, fault, *, when):
    """Strike at the first call of `owner.name` for which `when(*args, **kwargs)` holds."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def struck(*args, **kwargs):
        if when(*args, **kwargs):
            strike(fault)
        return original(*args, **kwargs)

    setattr(owner, name, struck)


def nth(n):
    counter = itertools.count()
    return lambda *args, **kwargs: next(counter) == n


def in_forward(fault):
    """At one microbatch of one call; every call begins with microbatch 0."""
    calls = itertools.count(-1)
    call = next(calls)

    def when(*args, current_microbatch, **kwargs):
        nonlocal call
        if current_microbatch == 0:
            call = next(calls)
        return (call, current_microbatch) == (fault["call"], fault["microbatch"])

    return when


def poison(schedules, fault):
    """A weight becomes NaN, and so does every loss from this microbatch on."""
    original, when = schedules.forward_step, in_forward(fault)

    @functools.wraps(original)
    def poisoned(step, data, model, *args, **kwargs):
        if when(**kwargs):
            mark(fault)
            list(model.parameters())[-1].data.fill_(float("nan"))
        return original(step, data, model, *args, **kwargs)

    schedules.forward_step = poisoned


def know_rerun_mode():
    """Megatron 0.19 names a mode in two ways: as --rerun-mode takes it, its state machine does not know it."""
    from megatron.core.rerun_state_machine import RerunMode

    RerunMode._value2member_map_["report_stats"] = RerunMode.REPORT_DETERMINISM_STATS


def end_data_early(training, fault, *, items):
    """The stage's iterator ends after `items` microbatches."""
    build = training.build_train_valid_test_data_iterators

    def shortened(*args, **kwargs):
        train, *others = build(*args, **kwargs)
        whole = train.iterable

        def until():
            yield from itertools.islice(whole, items)
            mark(fault)

        train.iterable = until()
        return train, *others

    training.build_train_valid_test_data_iterators = shortened


def arrange(fault):
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    match fault["where"]:
        case "forward" if fault["what"] == "nan":
            poison(schedules, fault)
        case "forward":
            before(schedules, "forward_step", fault, when=in_forward(fault))
        case "backward":
            before(schedules, "backward_step", fault, when=nth(8 * fault["call"] + fault["microbatch"]))
        case "finalize":
            before(training, "finalize_model_grads", fault, when=nth(fault["call"]))
        case "optimizer":
            before(ChainedOptimizer, "step", fault, when=nth(fault["call"]))
        case "save":
            before(dist_checkpointing, "save", fault, when=nth(0))
        case "data":
            before(training, "build_train_valid_test_data_iterators", fault, when=nth(0))
        case "iterator":
            end_data_early(training, fault, items=8 * fault["call"] + fault["microbatch"])


# ---------------------------------------------------------------------------------------------- what a closed pipeline leaves
def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own
    return found


def leftovers(opened, shared):
    """Threads of ours, descriptors opened with the pipeline that are still open, shared memory."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("rrfp")]
    now = descriptors()
    files = [f"{fd} {path}" for fd, path in now.items() if path == opened.get(fd) or "memfd:rrfp" in path]
    memory = [name for name in os.listdir("/dev/shm") if name not in shared and (str(os.getpid()) in name or "rrfp" in name)]
    return threads + files + memory


def watch_opening():
    """Note which descriptors the opening of the pipeline adds."""
    from rrfp.megatron import runtime

    opened = {}
    original = runtime.Runtime.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        old = descriptors()
        original(self, *args, **kwargs)
        opened.update({fd: path for fd, path in descriptors().items() if old.get(fd) != path})

    runtime.Runtime.__init__ = init
    return opened


def forget_inputs():
    """Megatron's model keeps its last input, which lies in a receive buffer, as long as it lives."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    for block in [thing for thing in gc.get_objects() if isinstance(thing, TransformerBlock)]:
        block.set_input_tensor(None)


def main():
    fault = json.loads(os.environ.get("RRFP_TEST_FAULT", "{}"))
    if isinstance(fault, list):
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        fault = fault[start] if start < len(fault) else {}
    if fault.get("where") == "rerun mode":
        know_rerun_mode()
    elif fault and int(os.environ["RANK"]) == fault["rank"]:
        arrange(fault)
    if not fault.get("close"):
        runpy.run_path(SCRIPT, run_name="__main__")
        return
    opened, shared, error = watch_opening(), os.listdir("/dev/shm"), None
    try:
        runpy.run_path(SCRIPT, run_name="__main__")
    except BaseException:
        error = traceback.format_exc()
    from rrfp.megatron import runtime

    runtime.close_all()
    forget_inputs()
    gc.collect()  # what the exception's frames held
    left = leftovers(opened, shared) or "none"
    print(f"opened {len(opened)} descriptors; leftovers: {left}\n{error}", file=sys.stderr, flush=True)
    sys.exit(0 if error is None else 1)


if __name__ == "__main__":
    main()
