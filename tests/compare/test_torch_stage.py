"""PyTorch's schedules on emulated stages: that they are PyTorch's, that durations, delays and memory are as drawn."""

from functools import partial

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from rrfp.compare.group import Contenders, Group, Job
from rrfp.compare.torch_stage import TORCH_MODES, TorchStage, check, stages, wire
from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode
from rrfp.simulate.scenarios import draw
from rrfp.trace.files import read

RANKS, MICROBATCHES, UNIT = 3, 5, 0.002
LATE = 0.03
DURATIONS = draw("lengths", RANKS, MICROBATCHES, UNIT, 0)[0]


def run(directory, *, mode, delays, ranks=RANKS, microbatches=MICROBATCHES, durations=DURATIONS, stage=TorchStage):
    """(outcome, rank -> its call) of one recorded call on real processes."""
    contenders = partial(Contenders, baselines={mode: stage})
    with Group(ranks, stage=contenders, call_timeout=30.0) as group:
        outcome = group.run(Job(mode, microbatches, durations, nbytes=256, delays=delays, trace=directory))
    assert group.left_behind == []
    timeline = read(directory)
    return outcome, timeline.of_call(timeline.calls[0])


def too_early(calls, delays) -> list[str]:
    """Messages that were used before they were due: sent plus the delay of the wire."""
    sent = {(m.edge, m.microbatch): m.time for call in calls.values() for m in call.sent}
    count = sum(len({ran.action.stage for ran in call.actions}) for call in calls.values())
    found = []
    for call in calls.values():
        assert call.arrivals, "no message was seen to arrive"
        started = {ran.action: ran.start for ran in call.actions}
        for edge, microbatch, time in call.arrivals:
            kind = "F" if edge.source < edge.destination else "B"
            due = sent[edge, microbatch] + delays.get((*wire(RANKS, edge.destination, kind, count=count), microbatch), 0.0)
            start = min(t for a, t in started.items() if a.stage == edge.destination and a.microbatch == microbatch
                        and (a.kind == "F") == (kind == "F") and a.kind != "W")
            if min(time, start) < due:
                found.append(f"{edge} of microbatch {microbatch}")
    return found


DELAYS = {("F", 1, 2): LATE, ("B", 0, 1): LATE, ("B", 1, 3): LATE}


@pytest.fixture(scope="module", params=TORCH_MODES)
def recorded(request, tmp_path_factory):
    return request.param, *run(tmp_path_factory.mktemp("trace"), mode=request.param, delays=DELAYS)


def test_every_action_runs_in_torchs_own_order(recorded):
    mode, _, calls = recorded
    for rank, call in calls.items():
        order = [str(ran.action) for ran in call.actions]
        kinds = "FB" if mode == "torch-1f1b" else "FIW"
        assert sorted(order) == sorted(f"{s}{k}{m}" for s in stages(mode, rank, RANKS) for k in kinds for m in range(MICROBATCHES))
    first, last = ([str(ran.action) for ran in calls[rank].actions] for rank in (0, RANKS - 1))
    if mode == "torch-1f1b":
        assert first == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0F4", "0B2", "0B3", "0B4"]
        assert last == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3", "2F4", "2B4"]
    else:  # ScheduleZBVZeroBubble: 2(P - rank) - 1 forwards of the first half, then the second half comes back
        assert first[:8] == ["0F0", "0F1", "0F2", "0F3", "0F4", "5F0", "5I0", "5W0"]
        assert last[:4] == ["2F0", "3F0", "2F1", "3F1"]


def test_an_action_takes_what_was_drawn(recorded):
    mode, _, calls = recorded
    halves = 1 if mode == "torch-1f1b" else 2
    for call in calls.values():
        for ran in call.actions:
            kind, stage, microbatch = ran.action
            assert ran.end - ran.start >= DURATIONS[kind, stage // halves, microbatch] / halves


def test_a_late_message_is_used_late(recorded):
    _, _, calls = recorded
    assert too_early(calls, DELAYS) == []


@pytest.mark.parametrize("mode", TORCH_MODES)
def test_without_the_delays_messages_are_used_early(tmp_path, mode):
    """Negative control: the check sees a baseline that is spared the delays."""
    everywhere = {(kind, rank, m): 10.0 for kind in "FB" for rank in range(RANKS) for m in range(MICROBATCHES)}
    _, calls = run(tmp_path, mode=mode, delays={})
    assert len(too_early(calls, everywhere)) == sum(len(call.arrivals) for call in calls.values()) > 0


def test_peaks_and_parts(recorded):
    mode, outcome, calls = recorded
    # Halves count half: the V holds on every rank what 1F1B holds at its first stage.
    assert outcome.peaks == ([3, 2, 1] if mode == "torch-1f1b" else [3, 3, 3])
    for rank, parts in enumerate(outcome.parts):
        total = round((calls[rank].end - calls[rank].begin) * 1e9)
        assert sum(parts.values()) == pytest.approx(total, abs=10)
        assert parts["F"] + parts["B"] > 0


def test_durations_may_be_given_by_kind_alone(tmp_path):
    _, calls = run(tmp_path, mode="torch-zbv", ranks=2, microbatches=2, durations={"F": UNIT, "B": 2 * UNIT}, delays={})
    for call in calls.values():
        assert len(call.actions) == 2 * 2 * 3  # halves, microbatches, F I W
        assert all(ran.end - ran.start >= UNIT / 2 for ran in call.actions)


def test_beside_ours_in_the_same_processes(tmp_path):
    """The baselines and RRFP's own modes take turns in one group."""
    contenders = partial(Contenders, baselines=dict.fromkeys(TORCH_MODES, TorchStage))
    with Group(2, stage=contenders, call_timeout=30.0) as group:
        for mode in ("torch-1f1b", parse_mode("ready:1f1b:1f1b"), "torch-zbv") * 2:
            outcome = group.run(Job(mode, 3, {"F": UNIT, "B": 2 * UNIT}, nbytes=64))
            assert outcome.seconds >= 3 * UNIT * 3 + (0 if mode == "torch-zbv" else 3 * UNIT), "faster than possible"
    assert group.left_behind == []


def test_a_torch_that_calls_something_else_is_refused(tmp_path):
    """Negative control of the check after each call: a stage whose overridden forward is not what runs."""

    class Bypassed(TorchStage):
        def _make(self, *arguments):
            made = super()._make(*arguments)
            for part in made[1]:
                part.forward_one_chunk = partial(PipelineStage.forward_one_chunk, part)
            return made

    with pytest.raises(RuntimeError, match=rf"torch-1f1b: torch {torch.__version__[:4]}.* as torch 2.13 does: ran"):
        run(tmp_path, mode="torch-1f1b", delays={}, ranks=2, microbatches=2, stage=Bypassed)


def test_too_few_microbatches_are_refused():
    with pytest.raises(ConfigurationError, match="--microbatches 3: torch-1f1b takes at least as many microbatches as stages; use 4"):
        check("torch-1f1b", 4, 3)
    check("torch-1f1b", 4, 4)
    check("torch-zbv", 4, 1)


def test_stages_and_wires_of_the_v():
    assert [stages("torch-zbv", rank, 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [stages("torch-1f1b", rank, 3) for rank in range(3)] == [(0,), (1,), (2,)]
    assert [wire(3, s, "F", count=3) for s in range(3)] == [None, ("F", 1), ("F", 2)]
    assert [wire(3, s, "B", count=3) for s in range(3)] == [("B", 0), ("B", 1), None]
    # Down the first arm with the forward wires, within the last rank, back up on the backward wires.
    assert [wire(3, s, "F", count=6) for s in range(6)] == [None, ("F", 1), ("F", 2), None, ("B", 1), ("B", 0)]
    assert [wire(3, s, "B", count=6) for s in range(6)] == [("B", 0), ("B", 1), None, ("F", 2), ("F", 1), None]
