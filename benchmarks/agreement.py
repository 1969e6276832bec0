"""What a decision costs: from the moment when nothing but the agreement is missing to the moment when the last member has the
action.

    python benchmarks/agreement.py [--decisions 300] [--members 2 4 8] [--kinds shared-memory messages broadcast all-gather]
                                   [--gap 0.005] [--skew 0.0002] [--spin 0.0002]

Every member runs in a process of its own and waits as the engine does, in its inbox. Between decisions all sleep `--gap`
seconds, an action, and up to `--skew` seconds more at random. In *ready* the messages are there before, and the clock starts
when the last member has ended its action. In *ahead* they are too, and members decide before that action what comes after it.
In *arrival* every decision waits for a message, and the clock starts when it has reached the last member. Microseconds, median
and 99th percentile; beside them Solo, a rank that agrees with itself, in the same loop. Kinds take turns in short rounds, so that other work on the machine disturbs all alike.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

from rrfp.action import Action, Edge
from rrfp.comm.rendezvous import FileStore
from rrfp.engine.inbox import Inbox
from rrfp.tp_coord.agreement import Solo
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.opening import COLLECTIVE, open_agreement

EDGE = Edge(0, 1)
WAIT = 30.0
ROUNDS = 10
CASES = ("ahead", "ready", "arrival")


class Member:
    """One rank: its end, and the inbox that it waits in."""

    def __init__(self, agreement):
        self._agreement, self._inbox, self._call = agreement, Inbox(), -1
        if agreement.bell is not None:
            self._inbox.listen(agreement.bell)
        agreement.open(lambda: self._inbox.put(None), self._inbox.put)

    def decide(self, case: str, decisions: int, gap: float, skew: float) -> list[tuple[float, float]]:
        """Per decision, when nothing but the agreement was missing at this member, and when it had the action."""
        self._call += 1
        self._agreement.begin(self._call)
        times, ready = [], deque()
        if case != "arrival":
            for microbatch in range(decisions):
                self._agreement.arrived(EDGE, microbatch)
        for microbatch in range(decisions):
            decided = None
            if case == "ahead":
                ready += [Action("F", 1, arrived) for _, arrived in self._agreement.common()]
                decided = self._agreement.decide(ready[0] if ready and self._agreement.leads else None)
            time.sleep(gap + skew * random.random())
            here = time.monotonic()
            if case == "arrival":
                self._agreement.arrived(EDGE, microbatch)
            while decided is None:
                ready += [Action("F", 1, arrived) for _, arrived in self._agreement.common()]
                if (decided := self._agreement.decide(ready[0] if ready else None)) is not None:
                    break
                if (failure := self._inbox.get(timeout=WAIT)) is not None:
                    raise RuntimeError(failure)
            times.append((here, time.monotonic()))
            if ready:  # a broadcast may decide before the message is here
                ready.popleft()
            while not self._inbox.empty():
                self._inbox.get_nowait()
        return times

    def close(self) -> None:
        self._agreement.close()


def serve(kind: str, rank: int, members: int, directory: str, options: dict, pipe) -> None:
    store = FileStore(directory)
    if kind in COLLECTIVE:
        import torch

        store = torch.distributed.FileStore(f"{directory}/store", members)
    agreement = Solo() if kind == "solo" else open_agreement(
        kind, domain=Domain(tuple(range(members))), rank=rank, store=store, edges=[EDGE], deadline=WAIT, **options)
    member = Member(agreement)
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        pipe.send(member.decide(*task))
    member.close()


class Group:
    """The members of one kind. A context manager."""

    def __init__(self, kind: str, members: int, directory: str, options: dict):
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        Path(directory).mkdir(parents=True)
        for rank in range(members):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            arguments = (kind, rank, members, directory, options, theirs)
            self._processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()
        for pipe in self._pipes:
            self._receive(pipe)

    @staticmethod
    def _receive(pipe):
        if not pipe.poll(2 * WAIT):
            raise RuntimeError("a member gave no answer")
        return pipe.recv()

    def latencies(self, case: str, *arguments) -> list[float]:
        """Seconds per decision, over all members."""
        for pipe in self._pipes:
            pipe.send((case, *arguments))
        rows = [self._receive(pipe) for pipe in self._pipes]
        return [max(got for _, got in each) - max(here for here, _ in each) for each in zip(*rows, strict=True)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(WAIT)
            if process.is_alive():
                process.kill()


def measure(kinds: list[str], members: list[int], decisions: int, *, gap: float = 0.005, skew: float = 0.0002, **options):
    """Seconds per decision, by (kind, number of members, case); ("solo", 1, case) is always there. options:
    `open_agreement`'s."""
    if any(kind in COLLECTIVE for kind in kinds):
        import torch  # noqa: F401 once, here: members inherit it
    cells = [("solo", 1), *((kind, count) for kind in kinds for count in members)]
    found = {(*cell, case): [] for cell in cells for case in CASES}
    with tempfile.TemporaryDirectory(prefix="rrfp-") as directory:
        groups = {(kind, count): Group(kind, count, f"{directory}/{kind}{count}", options) for kind, count in cells}
        try:
            for _ in range(ROUNDS):
                for cell, group in groups.items():
                    for case in CASES:
                        found[*cell, case] += group.latencies(case, max(1, decisions // ROUNDS), gap, skew)
        finally:
            for group in groups.values():
                group.close()
    return found


def table(found: dict[tuple[str, int, str], list[float]]) -> str:
    lines = ["| agreement | members |" + "".join(f" {case}: median us | p99 | x Solo |" for case in CASES),
             "|" + " --- |" * (2 + 3 * len(CASES))]
    for kind, members in dict.fromkeys(key[:2] for key in found):
        cells = []
        for case in CASES:
            seconds, solo = sorted(found[kind, members, case]), statistics.median(found["solo", 1, case])
            median, high = statistics.median(seconds), seconds[int(0.99 * (len(seconds) - 1))]
            cells += [f"{1e6 * median:.0f}", f"{1e6 * high:.0f}", f"{median / solo:.1f}"]
        lines.append(f"| {' | '.join([kind, str(members), *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=300, help="per kind and number of members")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=["shared-memory", "messages", "broadcast", "all-gather"])
    parser.add_argument("--gap", type=float, default=0.005, help="seconds between decisions")
    parser.add_argument("--skew", type=float, default=0.0002, help="seconds by which members are out of step")
    parser.add_argument("--spin", type=float, default=2e-4, help="shared memory: seconds of looking again before sleeping")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found = measure(options.kinds, options.members, options.decisions, gap=options.gap, skew=options.skew, spin_s=options.spin)
    print(table(found))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
