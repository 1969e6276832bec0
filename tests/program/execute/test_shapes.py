"""What no builder has, on real processes and the same engine; float64, 1e-12."""

import pytest

from rrfp.program.builders import BUILDERS
from rrfp.program.directives import Order, Place, Replicate, Shard, Split, apply
from rrfp.program.lower import lower
from rrfp.program.memory import memory
from rrfp.program.training import training_dag
from rrfp.trace.files import read
from tests.program.execute import jobs
from tests.program.execute.compare import worst

pytestmark = pytest.mark.timeout(240)
MODES = ["strict", "ready", "ready"]
TOLERANCE = 1e-12


def entry(tag, index, kind, m):
    return ({tag: index, "MB": m, "PASS": kind},)


def test_a_strategy_that_nobody_shipped(groups, seed):
    """Two encoders that join, stages of unlike size, backwards in another order than forwards, one of them split; two replicas."""
    back = (2, 0, 3, 1)

    def on(rank):
        return (2 * rank, 2 * rank + 1)

    directives = [
        Split({}, "MB", 4), Place({"VIT": "*"}, on(0)), Place({"TEXT": "*"}, on(1)), Place({"LLM": "*"}, on(2)),
        Order(tuple(entry("VIT", "*", "F", m) for m in range(4)) + tuple(entry("VIT", "*", "B", m) for m in back)),
        Order(tuple(entry("TEXT", 0, "F", m) for m in range(4)) + tuple(entry("TEXT", 0, kind, m) for m in back for kind in "IW")),
        Order(tuple(entry("LLM", "*", "F", m) for m in range(4)) + tuple(entry("LLM", "*", "B", m) for m in back)),
        *(Replicate({tag: "*"}, on(rank)) for rank, tag in enumerate(("VIT", "TEXT", "LLM"))),
    ]  # fmt: skip
    found, _ = worst(groups(6), ("diamond", 8), directives, replicas=2, pieces=8, modes=MODES, seed=seed)
    assert found < TOLERANCE


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_parameter_of_two_stages(groups, zero, seed):
    directives = BUILDERS["zb-1"](2, 4, replicas=2, zero=zero)
    found, _ = worst(groups(4), ("chain", 2, 8, "tied"), directives, replicas=2, pieces=8, modes=MODES, seed=seed)
    assert found < TOLERANCE


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_experts_in_fewer_pieces_than_devices(groups, zero, seed):
    """Four replicas, experts in two pieces: each piece has two replicas, which are kept equal."""
    kept = {"shard_optimizer": zero >= 1, "shard_grads": zero >= 2, "shard_params": zero >= 3}
    directives = [Split({}, "MB", 2), Place({}, (0, 1, 2, 3)), Shard({"EP": "*"}, (0, 1, 2, 3), ways=2), Replicate({}, (0, 1, 2, 3), **kept)]
    found, _ = worst(groups(4), ("chain", 2, 8, "experts"), directives, replicas=4, pieces=8, modes=MODES, seed=seed)
    assert found < TOLERANCE


def test_a_part_is_split_once_more(groups, seed):
    """The middle stage runs every microbatch in two halves: what comes in is sliced, what goes out is joined."""
    directives = [Split({}, "MB", 4), Split({"PP": 1}, "HALF", 2), Place({"PP": 0}, (0,)), Place({"PP": 1}, (1,)), Place({"PP": 2}, (0,))]
    found, _ = worst(groups(2), ("chain", 3, 16), directives, replicas=1, pieces=4, rows=4, modes=MODES, seed=seed)
    assert found < TOLERANCE


@pytest.mark.parametrize("options", [
    {"bucket_size": 1e-4}, {"bucket_size": 1e-4, "zero": 1}, {"bucket_size": 1e-4, "zero": 2}, {"bucket_size": 10.0, "zero": 2},
    {"experts": True, "bucket_size": 1e-4, "slotted": True, "reduce_stream": "all_to_all"},
], ids=str)  # fmt: skip
def test_reductions_in_parts_and_together(groups, options, seed):
    which = ("chain", 4, 8, *(["experts"] if "experts" in options else []))
    found, _ = worst(groups(4), which, BUILDERS["dualpipev"](2, 4, replicas=2, **options), replicas=2, pieces=8, modes=MODES, seed=seed)
    assert found < TOLERANCE


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_gathered_buckets_are_bounded(groups, prefetch):
    """ZeRO-3 over five segments on two devices: as many bytes as `rrfp.program.memory` says, while four microbatches go forward and back."""
    directives = [Split({}, "MB", 4), Place({}, (0, 1)), Replicate({}, (0, 1), shard_params=True, prefetch=prefetch)]
    which = ("chain", 4, 16)
    found, peaks = worst(groups(2), which, directives, replicas=2, pieces=8, modes=MODES)
    pool = memory(lower(apply(training_dag(jobs.subject(which).captured().traced), directives)), 0).pool
    whole = 8 * (4 * 36 + 30)
    assert found < TOLERANCE and pool == min(8 * 36 * (prefetch + 1), whole) < whole
    assert {peak.gathered for peak in peaks} == {pool}


def test_a_trace_shows_collectives_beside_the_actions(groups, tmp_path):
    directives = BUILDERS["1f1b"](2, 4, replicas=2, experts=True)
    worst(groups(4), ("chain", 2, 8, "experts"), directives, replicas=2, pieces=8, modes=["strict"], trace=str(tmp_path))
    call = read(tmp_path / "pipeline0").of_call(0)[0]
    names = {moved.what for moved in call.moved if moved.stream == "all_to_all"}
    assert "ALL_TO_ALL:F:block0.experts.in[MB=0]" in names and len(names) == 4 * 4
    assert {moved.stream for moved in call.moved} == {"all_to_all", "reduce", "own"}
