"""Real processes: many ranks start, run and end, leaving nothing; and warm-up is not coupled to the next action."""

import gc
import importlib
import json
import multiprocessing
import os
import statistics
import threading
from pathlib import Path

import pytest

from rrfp.compare.group import Group, Job, Stage
from rrfp.policy import Policy

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def nothing_left():
    """Compares this process' children, threads and descriptors before and after."""

    def held():
        threads = {thread.name for thread in threading.enumerate()}
        return len(multiprocessing.active_children()), threads, len(os.listdir("/proc/self/fd"))

    multiprocessing.get_context("fork").Barrier(1)  # makes the one arena that multiprocessing keeps for a process' life
    gc.collect()  # engines of earlier tests: each has a descriptor for as long as it lives
    before = held()
    yield
    gc.collect()
    assert held() == before


@pytest.mark.timeout(300)
def test_many_ranks_leave_nothing_behind(monkeypatch, nothing_left, full, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    many = importlib.import_module("many_ranks")
    ranks = 64 if full else 16
    times = many.measure(ranks, 10, Job(Policy(), ranks, {"F": 0.005, "B": 0.01}))
    with capsys.disabled():
        print(f"\n{ranks} ranks: start {times.start:.2f} s, 10 iterations {sum(times.iterations):.2f} s, end {times.end:.2f} s")
    assert len(times.iterations) == 10 and times.left_behind == []
    assert min(times.iterations) >= 3 * 0.005 * (2 * ranks - 1), "faster than possible: something did not run"


def test_what_is_left_behind_is_seen(nothing_left):
    """Negative control: a rank that does not close its transport."""

    class Careless(Stage):
        def close(self):
            self.__class__.kept = self

    with Group(2, stage=Careless) as group:
        group.run(Job(Policy(), 2, {"F": 0.001, "B": 0.001}))
    assert any("thread rrfp-rank0-receive" in what for what in group.left_behind)


def test_a_rank_that_fails_is_named_and_the_group_ends(nothing_left):
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 failed:.*rank 1 failed .1F1.: ZeroDivision|rank 1 failed:.*ZeroDivision"):
        with Group(2, call_timeout=30.0) as group:
            group.run(Failing(Policy(), 2))


class Failing:
    """A job whose second forward on stage 1 fails."""

    def __init__(self, policy, microbatches):
        self.mode, self.name, self.microbatches, self.nbytes, self.trace = policy, "failing", microbatches, 16, None

    def duration(self, action):
        return 1 / 0 if str(action) == "1F1" else 0.001

    def delay(self, edge, microbatch):
        return 0.0


# ---------------------------------------------------------------------- warm-up
def gap_of_warm_up(trace: Path, calls: int) -> list[float]:
    """Per call, seconds from the end of 0F0 to the start of 1F0, on the one clock of this host."""
    times = {}
    for rank in (0, 1):
        for line in (trace / f"rank{rank}.jsonl").read_text().splitlines()[1:]:
            event = json.loads(line)
            if event[0] == "action" and event[2] in ("0F0", "1F0"):
                times[event[1], event[2]] = event[3:5]
    return [times[call, "1F0"][0] - times[call, "0F0"][1] for call in range(calls)]


@pytest.mark.parametrize("policy", [Policy(), Policy(hint="1f1b", mode="strict")], ids=["ready", "strict"])
def test_warm_up_is_not_coupled_to_the_next_action(nothing_left, policy, tmp_path):
    """With F = 50 ms, coupled means 50 ms late. The median of several calls, since other work shares the machine."""
    calls = 9
    with Group(4) as group:
        for _ in range(calls):
            group.run(Job(policy, 4, {"F": 0.05, "B": 0.01}, trace=tmp_path))
    gaps = gap_of_warm_up(tmp_path, calls)
    print("gaps in ms:", " ".join(f"{1e3 * gap:.2f}" for gap in gaps))
    assert min(gaps) > 0.0, "1F0 cannot start before its input exists"
    assert statistics.median(gaps) < 0.010
