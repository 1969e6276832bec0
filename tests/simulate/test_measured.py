"""Costs from a trace: what is read back, what is taken out, and that a simulated run, traced, is predicted exactly."""

import json

import pytest
from frozen_costs import frozen

from rrfp.action import Action, Edge
from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode
from rrfp.placement import Placement
from rrfp.simulate.clock import CREDITS
from rrfp.simulate.costs import Costs, from_scenario
from rrfp.simulate.measured import costs_of, each_call, from_trace
from rrfp.trace.files import read
from rrfp.trace.recorder import Recorder

DYADIC = 2.0**-20
"""Times that are multiples of it add without rounding."""


def exact(costs):
    """The same costs in multiples of DYADIC."""
    durations, delays = ({key: round(value / DYADIC) * DYADIC for key, value in part.items()} for part in (costs.durations, costs.delays))
    durations |= {("B", s, m): durations["I", s, m] + durations["W", s, m] for kind, s, m in durations if kind == "B"}
    return Costs(costs.stages, costs.chunks, costs.microbatches, durations, delays)


def trace(directory, runs, *, gap=0.0, late=0.0, wake=0.0, ranks=None):
    """Writes simulated calls as the files of a run: runs is [(costs, mode)], one a call.

    gap: the engine takes so long before every action. late: every message takes so much longer. wake: an action that waited for a
    message starts so much later. All three are added to the times of the given run, which stay as they are otherwise.
    """
    recorders = {}
    for number, (costs, mode) in enumerate(runs):
        placement, policy = costs.placement, parse_mode(mode)
        durations = {key: value + gap for key, value in costs.durations.items()}
        delays = {key: value + late + wake for key, value in costs.delays.items()}
        result = Costs(costs.stages, costs.chunks, costs.microbatches, durations, delays).simulate(policy)
        begin = 1000.0 + 64.0 * number
        for rank in range(placement.ranks):
            if rank not in recorders:
                recorders[rank] = Recorder(rank=rank, stages=placement.stages_of(rank), directory=directory, ranks=ranks or placement.ranks)
            recorder = recorders[rank]
            recorder.mode = mode
            recorder.begin_call(number, microbatches=costs.microbatches, forward_only=False, now=begin)
            for action in result.rows[rank]:
                recorder.action(action, begin + result.spans[action].start + gap, begin + result.spans[action].end, 1)
            lanes, first = {}, costs.first_trainable
            for action in sorted((a for a in result.spans if a.kind != "W"), key=lambda action: result.spans[action].end):
                target = action.stage + (1 if action.kind == "F" else -1)
                if not (0 if action.kind == "F" else first) <= target < costs.stages or placement.rank_of(target) != rank or placement.rank_of(action.stage) == rank:
                    continue
                edge, lane = Edge(action.stage, target), action.microbatch % policy.lanes
                left = result.spans[action].end
                if action.stage < first and action.microbatch >= CREDITS:  # a frozen stage runs ahead until credits hold its messages
                    left = max(left, result.spans[Action("F", target, action.microbatch - CREDITS)].start)
                time = left + delays["F" if action.kind == "F" else "B", target, action.microbatch] - wake
                lanes[edge, lane] = time = max(time, lanes.get((edge, lane), 0.0))
                recorder.arrival(edge, action.microbatch, begin + time)
            recorder.end_call(begin + result.makespan)
    return directory


MODES = ("strict:1f1b:1f1b", "ready:announced", "ready:alt:2p", "ready:fill-alt:eager")


@pytest.mark.parametrize("mode", [*MODES, "ready:fill-r:2p-1", "strict:zb-h1:4", "ready:alt:2p:lanes=2"])
def test_a_traced_simulation_is_predicted_exactly(tmp_path, seed, mode):
    costs = exact(from_scenario("jitter-0.3", stages=4, microbatches=12, unit=0.02, seed=seed))
    found = from_trace(trace(tmp_path, [(costs, mode)]))
    policy = parse_mode(mode)
    assert found.mode == mode and found.splits == policy.split and (found.stages, found.microbatches) == (4, 12)
    assert found.durations == {key: value for key, value in costs.durations.items() if key in found.durations}
    assert set(found.delays.values()) == {0.0} and found.delays.keys() == costs.delays.keys()
    assert found.seconds == costs.simulate(policy).makespan == found.simulate(policy).makespan
    # Not tried yet, from this trace alone.
    for other in MODES:
        assert found.simulate(parse_mode(other)).makespan == costs.simulate(parse_mode(other)).makespan


@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced", "ready:fill-r:2p-1", "strict:zb-h1:4"])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_stages_at_the_start_that_ran_forwards_only_are_frozen(tmp_path, seed, first, mode):
    policy = parse_mode(mode)
    costs = frozen(exact(from_scenario("jitter-0.3", stages=4, microbatches=16, unit=0.02, seed=seed)), first, weightless=[3] if policy.split else [])
    found = from_trace(trace(tmp_path, [(costs, mode)]))
    assert found.first_trainable == first and found.weightless == costs.weightless and found.splits == policy.split
    assert found.durations == {key: value for key, value in costs.durations.items() if key in found.durations}
    assert {stage for kind, stage, _ in found.durations if kind != "F"} == set(range(first, 4)) and set(found.delays.values()) == {0.0}
    assert found.seconds == costs.simulate(policy).makespan == found.simulate(policy).makespan
    for other in MODES:  # not tried yet
        assert found.simulate(parse_mode(other)).makespan == costs.simulate(parse_mode(other)).makespan


def test_several_chunks(tmp_path, seed):
    costs = exact(from_scenario("jitter-0.3", stages=8, microbatches=8, unit=0.02, seed=seed, chunks=2))
    found = from_trace(trace(tmp_path, [(costs, "ready:announced")]))
    assert found.chunks == 2 and found.placement == Placement.looped(4, 2)
    for mode in ("ready:announced", "strict:1f1b"):
        assert found.simulate(parse_mode(mode)).makespan == costs.simulate(parse_mode(mode)).makespan


def test_what_the_engine_spends_is_told_apart(tmp_path, seed):
    gap, late, wake = 64 * DYADIC, 512 * DYADIC, 32 * DYADIC
    costs = exact(from_scenario("jitter-0.3", stages=4, microbatches=12, unit=0.02, seed=seed))
    found = from_trace(trace(tmp_path, [(costs, "ready:announced")], gap=gap, late=late, wake=wake))
    assert found.durations["B", 1, 3] == costs.durations["B", 1, 3] + gap
    assert found.delays["F", 2, 3] == late + wake and found.delays["F", 0, 3] == 0.0 and found.delays["B", 3, 3] == 0.0
    assert found.simulate(parse_mode("ready:announced")).makespan == found.seconds


@pytest.mark.parametrize("scenario", ["links", "spikes", "paper-language", "mixed"])
def test_late_messages(tmp_path, full, scenario):
    for seed in range(10 if full else 2):
        costs = exact(from_scenario(scenario, stages=6, microbatches=24, unit=0.02, seed=seed))
        found = from_trace(trace(tmp_path / str(seed), [(costs, "ready:announced")]))
        # What stood behind a late message is not known exactly, hence the tolerance.
        for mode in MODES:
            policy = parse_mode(mode)
            assert found.simulate(policy).makespan == pytest.approx(costs.simulate(policy).makespan, rel=0.03), (seed, mode)


def test_waiting_behind_others_is_not_a_delay(tmp_path):
    # Microbatch 1 is late, and 2 and 3 stand behind it: counted as their own, lanes could not help them.
    durations = {(kind, s, m): {"F": 1.0, "B": 2.0}[kind] for kind in "FB" for s in range(2) for m in range(6)}
    delays = {(kind, s, m): 0.25 for kind in "FB" for s in range(2) for m in range(6)} | {("F", 1, 1): 8.0}
    costs = Costs(2, 1, 6, durations, delays)
    found = from_trace(trace(tmp_path, [(costs, "ready:f-first:6")]))
    assert [found.delays["F", 1, m] for m in range(6)] == [0.25, 8.0, 0.25, 0.25, 0.25, 0.25]


def test_the_median_of_several_calls(tmp_path):
    base = exact(from_scenario("uniform", stages=3, microbatches=6, unit=0.0625, seed=0))
    noisy = [Costs(3, 1, 6, base.durations | {("F", 1, number): 1.0}, base.delays) for number in range(3)]
    directory = trace(tmp_path, [(each, "strict:1f1b") for each in noisy])
    alone, together = from_trace(directory, call=1), from_trace(directory, calls=[0, 1, 2])
    assert alone.durations["F", 1, 1] == 1.0 and together.durations["F", 1, 1] == base.durations["F", 1, 1]
    assert together.simulate(parse_mode("strict:1f1b")).makespan == base.simulate(parse_mode("strict:1f1b")).makespan
    assert [each.durations["F", 1, 1] for each in each_call(read(directory))] == [1.0, 0.0625]  # without the first


def test_what_surrounds_the_actions_counts_once(tmp_path):
    costs = exact(from_scenario("uniform", stages=3, microbatches=6, unit=0.0625, seed=0))
    path = trace(tmp_path, [(costs, "strict:1f1b")]) / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        if line[0] == "begin":
            line[4] -= 0.5
        elif line[0] == "end":
            line[2] += 0.25
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = from_trace(tmp_path)
    expected = costs.simulate(parse_mode("strict:1f1b")).makespan + 0.75
    assert found.seconds == expected == found.simulate(parse_mode("strict:1f1b")).makespan


def test_refusals(tmp_path):
    costs = from_scenario("uniform", stages=3, microbatches=4, unit=0.02, seed=0)

    def refused(match, name, runs=((costs, "strict:1f1b"),), edit=None, **options):
        directory = trace(tmp_path / name, runs, ranks=options.pop("ranks", None))
        path = directory / f"rank{options.pop('rank', 1)}.jsonl"
        if edit:
            path.write_text(edit(path.read_text()))
        with pytest.raises(ConfigurationError, match=match) as error:
            from_trace(directory, **options)
        assert "\n" not in str(error.value)

    def without(word):
        return lambda text: "".join(line for line in text.splitlines(keepends=True) if word not in line)

    refused("call 7 is not in the trace: it holds calls 0..0", "number", call=7)
    refused(r"lacks rank3.jsonl: .* copy the missing files", "missing", ranks=4)
    refused("ranks 1 did not complete it; name another call", "cut", edit=without('"end"'), call=0)
    refused("did not run 1B2: .*apart from frozen ones at the start", "cut short", edit=without('"1B2"'))
    refused("did not run 1B0: ", "frozen in the middle", edit=without('"1B'))
    refused("stage 0 got gradients and ran no backward: the trace lacks", "lost", edit=without('"0B'), rank=0)
    forwards = frozen(costs, 3)
    refused("call 0 ran no backward: every stage is frozen", "all frozen", [(forwards, "strict:1f1b")])
    refused("only Megatron's own placement", "placement", edit=lambda text: text.replace('"stages": [1]', '"stages": [1, 3]'))
    refused("evaluation, forwards only; name a training call", "evaluation", edit=lambda text: text.replace(", false, ", ", true, "), call=0)
    other = from_scenario("uniform", stages=3, microbatches=5, unit=0.02, seed=0)
    refused("calls 0, 1 do not run the same actions", "different", [(costs, "strict:1f1b"), (other, "strict:1f1b")], calls=[0, 1])
    with pytest.raises(ConfigurationError, match="no training call that every rank completed"):
        directory = trace(tmp_path / "none", [(costs, "strict:1f1b")])
        each_call(read(directory, calls=[]))


def test_a_hand_made_rendezvous_is_not_a_delay(tmp_path):
    """Under Megatron's schedule a message is received when its receiver comes for it."""
    times = {0: [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0B0", 7.5, 9.5), ("0B1", 11.5, 13.5)],
             1: [("1F0", 1.5, 4.5), ("1B0", 4.5, 7.0), ("1F1", 7.0, 9.0), ("1B1", 9.0, 11.0)]}
    arrivals = {0: [("1>0", 0, 7.5), ("1>0", 1, 11.5)], 1: [("0>1", 0, 1.5), ("0>1", 1, 7.0)]}
    for rank in (0, 1):
        recorder = Recorder(rank=rank, stages=[rank], directory=tmp_path, ranks=2, mode="megatron-1f1b")
        recorder.begin_call(0, microbatches=2, forward_only=False, now=0.0)
        for text, start, end in times[rank]:
            stage, kind, microbatch = text
            recorder.action(Action(kind, int(stage), int(microbatch)), start, end, 1)
        for edge, microbatch, time in arrivals[rank]:
            recorder.arrival(Edge(*map(int, edge.split(">"))), microbatch, time)
        recorder.end_call(13.5)
    found = costs_of(read(tmp_path))
    assert found.delays["F", 1, 1] == 0.5 and found.delays["F", 1, 0] == 0.5 and found.delays["B", 0, 1] == 0.5
