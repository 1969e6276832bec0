"""A small pipeline under a virtual clock that drives real recorders: what the exports are tested on."""

import random
from types import SimpleNamespace

import pytest

from rrfp.action import Action, Edge
from rrfp.trace.recorder import Recorder


DURATIONS = {"F": 0.02, "B": 0.04, "I": 0.02, "W": 0.02}


def pipeline(directory, *, stages, microbatches, seed=0, ready=False, split=False, emulated=True, calls=(1, 2), lost=None):
    """Records `calls` of a pipeline with one stage per rank into `directory`, in 1F1B order or (`ready`) as inputs come.

    `split`: backward as I and W. `lost`: that rank is gone before its last call ends. Returns every Recorder.
    """
    draw = random.Random(seed)
    recorders = [Recorder(rank=s, stages=[s], directory=directory, ranks=stages, debug=True) for s in range(stages)]
    now = 100.0
    for call in calls:
        last_use = now
        arrived = {("F", 0, m): now for m in range(microbatches)}
        free, held, todo, events = [now] * stages, [0] * stages, [], [[] for _ in range(stages)]
        for s in range(stages):
            warm, order = min(stages - s - 1, microbatches), []
            order += [("F", m) for m in range(warm)]
            for m in range(microbatches):
                order += [("F", warm + m)] * (warm + m < microbatches)
                order += [("I", m), ("W", m)] if split else [("B", m)]
            todo.append(order)
        back = "I" if split else "B"
        while any(todo):
            # The stage whose next action can start first goes next.
            options = []
            for s in range(stages):
                for index, (kind, m) in enumerate(todo[s]):
                    key = ("F" if kind == "F" else back, s, m)
                    when = free[s] if kind == "W" else arrived.get(key)
                    previous = any(other == kind for other, _ in todo[s][:index])
                    admitted = kind != "F" or held[s] < stages - s + 1
                    if kind == "W" and (back, m) in todo[s]:
                        continue
                    if when is not None and not previous and (admitted or index == 0):
                        options.append((max(when, free[s]), index, s, kind, m))
                    if not ready:
                        break
            start, index, s, kind, m = min(options)
            todo[s].pop(index)
            duration = draw.uniform(0.7, 1.3) * DURATIONS[kind] * (1 if draw.random() > 0.1 else 2)
            end, record = start + duration, recorders[s]
            if start > free[s]:
                events[s].append(("waited", "F" if kind == "F" else "B", free[s], start))
            held[s] += kind == "F"
            events[s].append(("action", Action(kind, s, m), start, end, held[s], duration * 0.7 if emulated else 0.0))
            held[s] -= kind in ("B", "W")
            target = s + 1 if kind == "F" else s - 1
            if kind == "F" and target == stages:
                arrived[back, s, m] = end
            elif kind in ("F", back) and 0 <= target < stages:
                came = end + 0.001
                arrived[kind if kind == "F" else back, target, m] = came
                events[s].append(("sent", Edge(s, target), m, end))
                events[target].append(("arrival", Edge(s, target), m, came))
            free[s] = end + 0.0002
            last_use = max(last_use, end)
        for s, record in enumerate(recorders):
            record.begin_call(call, microbatches=microbatches, forward_only=False, now=now)
            kept = events[s][: len(events[s]) // 2] if lost == s and call == calls[-1] else events[s]
            for name, *arguments in kept:
                getattr(record, name)(*arguments)
            if kept is events[s]:
                record.end_call(free[s] + 0.001)
            else:
                record.close()
        now = last_use + 0.05
    return recorders


@pytest.fixture
def make(tmp_path):
    """`make(name, stages=, microbatches=, ...)` records a run into a folder of its own; `.directory`, `.recorders`."""

    def run(name="run", **options):
        recorders = pipeline(tmp_path / name, **options)
        return SimpleNamespace(directory=tmp_path / name, recorders=recorders)

    return run
