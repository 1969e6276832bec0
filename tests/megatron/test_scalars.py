"""Scalars of a pipeline through Megatron's writers: what is written, when, by whom, and that nobody waits for anybody."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rrfp.comm.rendezvous import FileStore
from rrfp.megatron.scalars import Scalars, scalars, summary
from rrfp.trace.breakdown import Breakdown

NAMES = {"rrfp/bubble-share", "rrfp/bubble-share-max", "rrfp/blocked-on-forward-seconds", "rrfp/blocked-on-backward-seconds",
         "rrfp/peak-in-flight"}


def call(*, total=1.0, forward=0.1, backward=0.2, peak=3, forward_only=False):
    ns = 10**9
    blocked = {"F": round(forward * ns), "B": round(backward * ns)}
    return Breakdown(rank=0, call=0, total=round(total * ns), compute=round(total * ns) - sum(blocked.values()), emulated=0, blocked=blocked,
                     runtime=0, peak_in_flight={0: peak}, forward_only=forward_only)


class Board:
    """What is used of torch.utils.tensorboard.SummaryWriter."""

    def __init__(self):
        self.written = []

    def add_scalar(self, tag, value, step):
        self.written.append((step, tag, value))


class Wandb:
    """What is used of the module wandb, which Megatron keeps as its writer."""

    def __init__(self):
        self.run, self.written = object(), []

    def log(self, values, step):
        assert self.run is not None, "wandb.log after finish raises"
        self.written += [(step, tag, value) for tag, value in values.items()]


class Job:
    """Megatron's global variables, and the `Scalars` of every rank of one pipeline. One process plays all ranks in turn."""

    def __init__(self, monkeypatch, folder, *, ranks=3, interval=1, **arguments):
        self.board, self.wandb = Board(), None
        self.arguments = SimpleNamespace(**{"tensorboard_dir": "somewhere", "log_interval": interval, "curr_iteration": 0} | arguments)
        fake = ModuleType("megatron.training.global_vars")
        fake.get_args = lambda: self.arguments
        fake.get_tensorboard_writer = lambda: self.board
        fake.get_wandb_writer = lambda: self.wandb
        for name in ("megatron", "megatron.training"):
            package = ModuleType(name)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", fake)
        self.store = FileStore(folder)
        self.ranks = [Scalars(rank=rank, ranks=ranks, store=self.store) for rank in range(ranks)]

    def iterate(self, *calls, order=None):
        """One iteration in which rank r ends call r; ranks end in `order`."""
        for rank in order or range(len(self.ranks)):
            self.ranks[rank].add(calls[rank])
        self.arguments.curr_iteration += 1

    def steps(self):
        return sorted({step for step, _, _ in self.board.written})


@pytest.fixture
def job(monkeypatch, tmp_path):
    return lambda **options: Job(monkeypatch, tmp_path, **options)


def test_the_values():
    records = [summary([call(forward=0.0, backward=0.4, peak=4), call(forward=0.0, backward=0.2, peak=3)]), summary([call()])]
    assert records[0] == pytest.approx({"total": 1.0, "waited": 0.3, "F": 0.0, "B": 0.3, "peak": 4})
    records[1]["waited"] = 0.5  # by whatever other cause
    assert scalars(records) == pytest.approx({
        "rrfp/bubble-share": 0.4, "rrfp/bubble-share-max": 0.5, "rrfp/blocked-on-forward-seconds": 0.05,
        "rrfp/blocked-on-backward-seconds": 0.25, "rrfp/peak-in-flight": 4})


def test_every_ranks_share_is_in_what_the_last_rank_writes(job):
    job = job()
    job.iterate(call(backward=0.6, forward=0.0), call(), call(forward=0.3, backward=0.0, peak=1), order=(2, 0, 1))
    assert job.board.written == []
    job.ranks[-1].write()  # after its gradients are final
    assert {tag for _, tag, _ in job.board.written} == NAMES and job.steps() == [1]
    values = {tag: value for _, tag, value in job.board.written}
    assert values["rrfp/bubble-share"] == pytest.approx(0.4) and values["rrfp/bubble-share-max"] == pytest.approx(0.6)
    job.ranks[-1].write()
    job.ranks[-1].close()
    assert len(job.board.written) == len(NAMES), "written once"


def test_only_at_the_log_interval_over_all_calls_since(job):
    job = job(interval=3)
    for iteration in range(7):
        job.iterate(*[call(total=1.0 + iteration)] * 3)
        job.ranks[-1].write()
        evaluation = call(forward=0.9, backward=0.0, forward_only=True)
        for rank in job.ranks:
            rank.add(evaluation)
    assert job.steps() == [3, 6]
    shares = [value for _, tag, value in job.board.written if tag == "rrfp/bubble-share"]
    assert shares == pytest.approx([0.9 / 6, 0.9 / 15])  # 1 + 2 + 3 seconds, then 4 + 5 + 6


def test_a_rank_that_is_behind_or_ahead_is_not_mixed_up(job):
    job = job(ranks=2)
    first, last = job.ranks
    last.add(call(forward=0.0, backward=0.0))
    last.write()
    assert job.board.written == [], "rank 0 has not reported yet: nobody waits, nothing is written"
    first.add(call(forward=0.5, backward=0.0))
    job.arguments.curr_iteration = 1
    first.add(call(forward=0.9, backward=0.0))  # one iteration ahead, before the last rank has read
    last.add(call(forward=0.0, backward=0.0))
    last.write()
    shares = [(step, value) for step, tag, value in job.board.written if tag == "rrfp/bubble-share"]
    assert shares == [(1, pytest.approx(0.25)), (2, pytest.approx(0.45))]


def test_what_never_gets_complete_is_named_the_last_ranks(job):
    job = job(ranks=2)
    job.ranks[1].add(call())
    job.arguments.curr_iteration = 1
    job.ranks[1].add(call(peak=1))
    assert {(step, tag) for step, tag, _ in job.board.written} == {(1, f"{name}-of-last-rank") for name in NAMES}
    job.ranks[1].close()
    assert (2, "rrfp/peak-in-flight-of-last-rank", 1) in job.board.written


def test_wandb_takes_the_same_until_it_is_finished(job):
    job = job(tensorboard_dir=None, wandb_project="project", ranks=2)
    job.board, job.wandb = None, Wandb()
    job.iterate(call(), call())
    job.ranks[-1].write()
    assert {tag for _, tag, _ in job.wandb.written} == NAMES
    job.ranks[-1].add(call())
    job.wandb.run = None
    job.ranks[-1].close()
    assert len(job.wandb.written) == len(NAMES)


@pytest.mark.parametrize("missing", ["writer", "arguments", "training"])
def test_without_a_writer_the_store_is_left_alone(job, monkeypatch, missing):
    job = job(**({"tensorboard_dir": None, "wandb_project": ""} if missing == "writer" else {}))
    if missing == "arguments":
        def uninitialised():
            raise AssertionError("args is not initialized.")

        sys.modules["megatron.training.global_vars"].get_args = uninitialised
    if missing == "training":
        monkeypatch.delitem(sys.modules, "megatron.training.global_vars")
    job.store.set = job.store.check = None  # would fail if it were called
    job.iterate(call(), call(), call())
    job.ranks[-1].write()
    job.ranks[-1].close()
    assert job.board.written == []


def test_a_job_with_a_writer_does_use_the_store(job):
    """Negative control of the test above."""
    job = job()
    job.store.set = None
    with pytest.raises(TypeError):
        job.iterate(call(), call(), call())
