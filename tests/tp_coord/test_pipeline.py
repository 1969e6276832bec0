"""A pipeline of domains over the real transport: members in step whatever the delays, and told of every failure."""

import multiprocessing
import re
import signal
from multiprocessing.connection import wait

import pipeline
import pytest

from rrfp.policy import Policy

STAGES, MEMBERS = 3, 2
POLICIES = [Policy(), Policy(hint="fill-alt", limit="2p", order="free", lanes=2)]


class Job:
    """All ranks. A context manager."""

    def __init__(self, kind, directory, **options):
        context = multiprocessing.get_context("fork")
        self.ranks = range(STAGES * MEMBERS)
        pipes = [context.Pipe() for _ in self.ranks]
        self._pipes = [ours for ours, _ in pipes]
        self.processes = [context.Process(target=_serve, args=(kind, rank, directory, options, pipes), daemon=True)
                          for rank in self.ranks]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            try:
                pipe.send(None)
            except OSError:
                pass  # it has ended
        for process in self.processes:
            process.join(30.0)
            stuck = process.exitcode is None
            process.kill()
            process.join()
            assert not stuck
        for pipe in self._pipes:
            pipe.close()

    def ask(self, *arguments, only=None) -> dict[int, object]:
        """What `_serve` answers, by rank; ranks that end give none."""
        pipes = {self._pipes[rank]: rank for rank in (self.ranks if only is None else only)}
        for pipe in pipes:
            pipe.send(arguments)
        rows = {}
        while pipes:
            ready = wait(list(pipes), 60.0)
            assert ready, f"ranks {sorted(pipes.values())} gave no answer"
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    rows[rank] = pipe.recv()
                except EOFError:
                    pass
        return rows


def _serve(kind, rank, directory, options, pipes):
    pipe = pipes[rank][1]
    for ours, theirs in pipes:
        ours.close()
        if theirs is not pipe:
            theirs.close()
    member = pipeline.Rank(kind, rank, STAGES, MEMBERS, directory, **options)
    while (task := pipe.recv()) is not None:
        name, *arguments = task
        pipe.send(getattr(Serving, name)(member, *arguments))
    member.close()


class Serving:
    """What a rank does when asked."""

    @staticmethod
    def run(member, seed, microbatches, policy):
        return member.run(seed, microbatches, POLICIES[policy])

    @staticmethod
    def fault(member, seed, microbatches, victim, action, what):
        fault = (action, getattr(pipeline, what)) if member.rank == victim else None
        return pipeline.timed(lambda: member.run(seed, microbatches, POLICIES[0], fault))[0]


def parted(rows) -> list[int]:
    """Stages whose members have run different sequences."""
    return [stage for stage in range(STAGES)
            if len({tuple(rows[stage * MEMBERS + member]) for member in range(MEMBERS)}) > 1]


@pytest.mark.parametrize("kind", ["shared-memory", "messages"])
def test_members_run_one_sequence_under_delays_of_their_own(kind, tmp_path, seed, full):
    with Job(kind, tmp_path) as job:
        for call in range(40 if full else 6):
            policy, microbatches = call % len(POLICIES), 4 + call % 5
            rows = job.ask("run", seed + call, microbatches, policy)
            assert len(rows) == STAGES * MEMBERS and all(len(order) == 2 * microbatches for order in rows.values())
            assert parted(rows) == []


def test_without_an_agreement_they_part(tmp_path):
    """Negative control: each member goes its own way, and the comparison above sees it."""
    with Job(None, tmp_path) as job:
        assert any(parted(job.ask("run", call, 8, 1)) for call in range(10))


@pytest.mark.parametrize("kind", ["shared-memory", "messages"])
@pytest.mark.parametrize("what, told", [
    ("fail", r"rank {victim} failed \(1F3\): ValueError: an action that fails"),
    ("kill", r"rank {victim} was lost \([^)]*\): rank {victim} \(process {pid}\) ended without saying goodbye"),
    ("stop", r"rank {victim} was lost \([^)]*\): no sign of life for \d+ s: stopped, or its machine hangs"),
], ids=["fail", "kill", "stop"])
def test_every_rank_of_the_job_is_told_the_same(kind, what, told, tmp_path):
    """The victim is no neighbour of the other members' pipeline: only its domain tells them."""
    victim = MEMBERS + 1
    with Job(kind, tmp_path) as job:
        job.ask("run", 1, 4, 0)
        others = [rank for rank in job.ranks if rank != victim]
        if what == "stop":
            job._pipes[victim].send(("fault", 1, 6, victim, "1F3", what))
            rows = job.ask("fault", 1, 6, victim, "1F3", what, only=others)
            job.processes[victim].kill()
        else:
            rows = job.ask("fault", 1, 6, victim, "1F3", what)
        text = told.format(victim=victim, pid=job.processes[victim].pid)
        for rank in others:
            assert re.match(text, rows[rank]), f"rank {rank}: {rows[rank]}"
        if what == "kill":
            job.processes[victim].join(10.0)
            assert job.processes[victim].exitcode == -signal.SIGKILL
