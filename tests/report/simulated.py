"""Traces of simulated calls: what a report is tested on, since there the cause of every second is known."""

from bisect import insort
from collections import defaultdict

from rrfp.action import Edge, parse_edge
from rrfp.mode import parse_mode
from rrfp.scheduler.dependencies import chain
from rrfp.simulate.costs import Costs, from_scenario
from rrfp.trace.files import read
from rrfp.trace.recorder import Recorder

UNIT = 0.02


def record(directory, costs: Costs, mode="strict:1f1b:1f1b", *, calls=1, lost=None, tell=True, overhead=1e-4, simulated=None, meets=False):
    """Writes `calls` equal simulated calls into `directory` and returns their Timeline.

    lost: this rank's last call breaks off in the middle. tell: write the mode into the trace. overhead: seconds of a call before
    its first and after its last action. simulated: a Result that is already there. meets: messages are received when their receiver
    comes for them, as in Megatron's schedule.
    """
    policy = parse_mode(mode)
    placement = costs.placement
    result = simulated or costs.simulate(policy)
    dependencies = [chain(placement, rank, costs.microbatches, split=policy.split, first_trainable=costs.first_trainable)
                    for rank in range(placement.ranks)]
    tasks = {action: task for each in dependencies for action, task in each.tasks.items()}
    sent = defaultdict(list)
    for action, span in result.spans.items():
        for edge in tasks[action].sends:
            insort(sent[edge], (span.end, action))
    came: dict[tuple[Edge, int], float] = {}
    for edge, messages in sent.items():
        free = defaultdict(float)
        for left, action in messages:
            lane = action.microbatch % policy.lanes  # as the transport deals them
            late = costs.delays["F" if action.kind == "F" else "B", edge.destination, action.microbatch] if costs.delays else 0.0
            free[lane] = came[edge, action.microbatch] = max(left + late, free[lane])
    recorders = [Recorder(rank=r, stages=placement.stages_of(r), directory=directory, ranks=placement.ranks, debug=True,
                          mode=("megatron-1f1b" if meets else mode) if tell else None) for r in range(placement.ranks)]
    for call in range(calls):
        zero = 100.0 + call * (result.makespan + 1.0)
        for rank, recorder in enumerate(recorders):
            recorder.begin_call(call, microbatches=costs.microbatches, forward_only=False, now=zero - overhead)
            row = result.rows[rank]
            gone = lost == rank and call == calls - 1
            free = held = 0
            for action in row[: len(row) // 2] if gone else row:
                start, end = result.spans[action]
                task = tasks[action]
                ready = max([free, *(came[edge, action.microbatch] for edge in task.arrivals),
                             *(result.spans[other].end for other in task.after)])
                ready = start if meets else ready
                if ready > free:
                    recorder.waited(action.kind if action.kind in "FW" else "B", zero + free, zero + ready)
                if start > ready:
                    recorder.waited("announced", zero + ready, zero + start)
                for edge in task.arrivals:
                    recorder.arrival(edge, action.microbatch, zero + (start if meets else came[edge, action.microbatch]))
                held += task.in_flight > 0
                recorder.action(action, zero + start, zero + end, held)
                held += min(task.in_flight, 0)
                for edge in task.sends:
                    recorder.sent(edge, action.microbatch, zero + end)
                free = end
            if gone:
                recorder.close()
            else:
                recorder.end_call(zero + result.makespan + overhead)
    return read(directory)


def change(costs: Costs, *, durations=lambda kind, stage, microbatch: 1.0, delays=lambda kind, stage, microbatch: 0.0) -> Costs:
    """The same costs with durations times and delays plus what these functions of (kind, stage, microbatch) give."""
    return Costs(costs.stages, costs.chunks, costs.microbatches,
                 {key: value * durations(*key) for key, value in costs.durations.items()},
                 {key: value + delays(*key) for key, value in costs.delays.items()})


def scenario(name, *, stages=6, microbatches=20, seed=0, chunks=1) -> Costs:
    return from_scenario(name, stages=stages, microbatches=microbatches, unit=UNIT, seed=seed, chunks=chunks)


def straggler(stage=3, factor=1.5, **options) -> Costs:
    """Jittery stages, one of them slower by `factor`."""
    return change(scenario("jitter-0.1", **options), durations=lambda kind, s, m: factor if s == stage else 1.0)


def late_edge(edge="2>3", units=2.0, **options) -> Costs:
    """Jittery stages, every message on one edge late by `units` forwards."""
    source, destination = parse_edge(edge)
    kind = "F" if source < destination else "B"
    return change(scenario("jitter-0.1", **options),
                  delays=lambda k, s, m: units * UNIT if (k, s) == (kind, destination) else 0.001)


def small_limit(**options) -> Costs:
    """Stages 0 and 1 cost what a microbatch's images cost: under 1F1B's limit the others run dry."""
    return scenario("images", **options)
