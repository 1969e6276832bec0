"""The options: each checked once, with a line that names flag, value, rule and way out; and the flags that carry them."""

import argparse
import dataclasses
import subprocess
import sys

import pytest

from rrfp.errors import ConfigurationError
from rrfp.megatron.arguments import add_arguments, options_from
from rrfp.megatron.options import Options
from rrfp.policy import Policy

# value, what the line names, a way out that it gives
REFUSED = [
    ({"schedule": "zero"}, "--pipeline-schedule zero", "1f1b, rrfp"),
    ({"hint": "fast"}, "--rrfp-hint fast", "announced, "),
    ({"hint": "/nowhere/hint.csv"}, "--rrfp-hint /nowhere/hint.csv", "file's path"),
    ({"hint": "zb-h2"}, "--rrfp-hint zb-h2", "1f1b"),
    ({"mode": "eager"}, "--rrfp-mode eager", "ready, strict"),
    ({"limit": "1f2b"}, "--rrfp-limit 1f2b", "eager"),
    ({"limit": 0}, "--rrfp-limit 0", "at least 1"),
    ({"limit": "-3"}, "--rrfp-limit -3", "at least 1"),
    ({"limit": "paper:0"}, "--rrfp-limit paper:0", "paper:<number>"),
    ({"limit": "paper:"}, "--rrfp-limit paper:", "paper:<number>"),
    ({"limit": "memory:0"}, "--rrfp-limit memory:0", "memory:<GiB>"),
    ({"limit": "1,2"}, "--rrfp-limit 1,2", "7,5,3,1"),
    ({"memory_fraction": 0}, "--rrfp-memory-fraction 0", "above 0 and at most 1"),
    ({"memory_fraction": 1.5}, "--rrfp-memory-fraction 1.5", "above 0 and at most 1"),
    ({"order": "any"}, "--rrfp-order any", "microbatch, megatron, free"),
    ({"lanes": 0}, "--rrfp-lanes 0", "use 1"),
    ({"hint": "fill-r"}, "--rrfp-hint fill-r", "add --rrfp-split-backward"),
    ({"split_backward": True, "max_pending_w": 0}, "--rrfp-max-pending-w 0", "leave it out"),
    ({"max_pending_w": 2}, "--rrfp-max-pending-w 2", "--rrfp-split-backward"),
    ({"split_backward": True, "schedule": "1f1b"}, "--rrfp-split-backward with --pipeline-schedule 1f1b", "use --pipeline-schedule rrfp"),
    ({"timeout": 0}, "--rrfp-timeout 0", "above 0"),
    ({"timeout": -2.5}, "--rrfp-timeout -2.5", "above 0"),
    ({"timeout": float("nan")}, "--rrfp-timeout nan", "above 0"),
    ({"emulate": "rain"}, "--rrfp-emulate rain", "choose one of uniform"),
    ({"emulate": "images:0"}, "--rrfp-emulate images:0", "images:30:7"),
    ({"emulate": "images:20:x"}, "--rrfp-emulate images:20:x", "images:30:7"),
    ({"emulate": "images:20:1:2"}, "--rrfp-emulate images:20:1:2", "images:30:7"),
    ({"inject": "J9"}, "--rrfp-inject J9", "J0, J1, J2, J3"),
    ({"inject": "J1", "emulate": "images"}, "--rrfp-inject J1 with --rrfp-emulate images", "one of the two"),
]


@pytest.mark.parametrize("options, named, way_out", REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_refused_in_one_line(options, named, way_out):
    with pytest.raises(ConfigurationError) as refused:
        Options(**options)
    line = str(refused.value)
    assert line.startswith(named) and way_out in line and "\n" not in line


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "1f1b"},
        {"hint": "bf", "mode": "strict", "limit": "eager"},
        {"limit": 3},
        {"limit": "paper:4"},
        {"limit": "7,5,3,1"},
        {"limit": "memory:2.5"},
        {"limit": "auto", "memory_fraction": 0.5},
        {"lanes": 4, "order": "free"},
        {"timeout": 0.5},
        {"timeout": None},
        {"emulate": "images"},
        {"emulate": "images:2.5:9"},
        {"inject": "J0"},
        {"trace": "somewhere"},
    ],
)
def test_accepted(options):
    """Control of the refusals."""
    made = Options(**options)
    assert all(getattr(made, name) == value for name, value in options.items())
    assert made.policy == Policy(hint=made.hint, mode=made.mode, limit=str(made.limit), order=made.order, lanes=made.lanes)


def test_equal_options_are_equal_and_cannot_be_changed():
    assert Options(limit=3) == Options(limit=3) != Options(limit=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().limit = "eager"
    with pytest.raises(TypeError):
        Options("rrfp")


def test_instruments_are_what_megatrons_schedule_is_wrapped_for():
    assert not Options(schedule="1f1b", limit="eager", timeout=3).instruments
    assert all(Options(schedule="1f1b", **one).instruments for one in ({"trace": "d"}, {"emulate": "links"}, {"inject": "J2"}))


# ------------------------------------------------------------------------------------------------- flags
def parse(*argv: str, **others) -> argparse.Namespace:
    return argparse.Namespace(**vars(add_arguments(argparse.ArgumentParser()).parse_args(argv)), **others)


def test_defaults_are_those_of_install_but_for_the_schedule():
    options = options_from(parse(distributed_timeout_minutes=3))
    assert options == Options(schedule="1f1b", timeout=180.0)


def test_every_option_has_its_flag():
    flags = parse(
        *"--pipeline-schedule rrfp --rrfp-hint bf --rrfp-mode strict --rrfp-limit 5 --rrfp-memory-fraction .5 --rrfp-order free --rrfp-lanes 2"
        " --rrfp-interface lo"
        " --rrfp-timeout 7 --rrfp-trace DIR --rrfp-emulate links:3:4".split(),
        profile=True,
    )
    assert options_from(flags) == Options(
        schedule="rrfp",
        hint="bf",
        mode="strict",
        limit="5",
        memory_fraction=0.5,
        order="free",
        lanes=2,
        interface="lo",
        timeout=7.0,
        trace="DIR",
        emulate="links:3:4",
        nvtx=True,
    )
    assert options_from(parse("--rrfp-inject", "J3")).inject == "J3"
    fields = {field.name for field in dataclasses.fields(Options) if field.init} - {"schedule", "nvtx"}
    assert {f"rrfp_{name}" for name in fields} == {name for name in vars(flags) if name.startswith("rrfp_")}


def test_a_timeout_of_zero_is_not_taken_for_none():
    with pytest.raises(ConfigurationError, match="--rrfp-timeout 0"):
        options_from(parse("--rrfp-timeout", "0"))


def test_flags_are_added_once():
    """A patched Megatron tree adds them itself, before the launcher would."""
    parser = add_arguments(argparse.ArgumentParser())
    before = len(parser._actions)
    assert add_arguments(parser) is parser and len(parser._actions) == before
    assert sum(group.title.startswith("readiness-driven pipeline") for group in parser._action_groups) == 1


def test_help_formats():
    text = add_arguments(argparse.ArgumentParser()).format_help()
    assert all(
        flag in text
        for flag in (
            "--pipeline-schedule {1f1b,rrfp}",
            "--rrfp-hint HINT",
            "--rrfp-timeout SECONDS",
            "--rrfp-inject {J0,J1,J2,J3}",
        )
    )


def test_neither_torch_nor_megatron_is_imported():
    script = "import sys, rrfp.megatron.options, rrfp.megatron.arguments; sys.exit(bool({'torch', 'megatron'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize(("given", "expected"), [
    ({"global_batch_size": 32}, {8}),
    ({"global_batch_size": 32, "eval_global_batch_size": 8, "eval_micro_batch_size": 4}, {8, 1}),
    ({"global_batch_size": 32, "rampup_batch_size": ["16", "8", "1000"]}, {4, 6, 8}),
    ({"global_batch_size": 4, "step_batch_size_schedule": "0:8 250B:16"}, {2, 4, 1}),
])
def test_start_up_knows_every_number_of_microbatches(given, expected):
    from rrfp.megatron import _microbatches

    assert _microbatches(argparse.Namespace(micro_batch_size=2, data_parallel_size=2, **given)) == expected


@pytest.mark.parametrize("given, recomputation, bound", [
    (None, None, None), (None, "selective", None), (None, "full", 1), (3, "full", 3), (3, None, 3)])
def test_the_bound_on_pending_weight_gradients(given, recomputation, bound):
    """A slot of the limit does for it, but not where everything else is recomputed."""
    options = Options(split_backward=True, max_pending_w=given)
    assert options.policy.split and options.policy_for(argparse.Namespace(recompute_granularity=recomputation)).max_pending_w == bound
    assert Options().policy_for(argparse.Namespace(recompute_granularity=recomputation)).max_pending_w is None
