"""Members of a domain in processes of their own, started once and then told what to do.

`Members.ask(function, *arguments)` runs `function(end, *arguments)` in every member's process at once and returns the results
in order of members. What a function raises is returned, not raised: what each member makes of a fault is what tests look at.
"""

import faulthandler
import gc
import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

from rrfp.action import Action, Edge
from rrfp.engine.inbox import Inbox
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Failure
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.opening import COLLECTIVE, open_agreement

WAIT = 20.0
EDGES = (Edge(0, 1), Edge(2, 1))
LANES = 2


class End:
    """One member, in its process."""

    def __init__(self, kind: str, agreement, rank: int, ranks: tuple[int, ...]):
        self.kind, self.agreement, self.rank, self.ranks = kind, agreement, rank, ranks
        self.call = -1
        self.failure: Failure | None = None
        self._box = Inbox()
        if agreement.bell is not None:
            self._box.listen(agreement.bell)
        agreement.open(lambda: self._box.put(None), self._box.put)

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def begin(self) -> None:
        self.call += 1
        self.agreement.begin(self.call)

    def wait(self, seconds: float = WAIT) -> None:
        """Until there is news. Raises what failed, TimeoutError if nothing comes."""
        try:
            news = self._box.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"rank {self.rank} heard nothing: {self.agreement.state()}") from None
        if news is not None:
            self.failure = news
            raise Failed(news)

    def until_failure(self, seconds: float = WAIT) -> Failure:
        until = time.monotonic() + seconds
        try:
            while True:
                self.wait(max(0.0, until - time.monotonic()))
        except Failed as failed:
            return failed.args[0]


class Failed(Exception):
    """The agreement told of a failure."""


def held() -> set[str]:
    """Threads and descriptors of this process."""
    found = {f"thread {thread.name}" for thread in threading.enumerate()}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(f"descriptor {descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
        except OSError:
            pass  # the one that listed them
    return found


def page_of(end) -> int:
    """The inode of this member's page, 0 if it has none."""
    page = getattr(getattr(end.agreement._channel, "_life", end.agreement._channel), "_page", None) if end is not None else None
    return os.fstat(page.fd).st_ino if page is not None else 0


class Members:
    """A context manager.

    Args:
        kind: as `open_agreement`'s, which gets `options` too.
        ranks: the members; numbers need not be dense.
        hosts: per member, which host it is to believe that it is on.
        domain_ranks: the domain, if only `ranks` of it come.
    """

    def __init__(self, kind: str, ranks, directory, *, hosts=None, domain_ranks=None, **options):
        self.ranks = tuple(ranks)
        if kind in COLLECTIVE:
            import torch  # noqa: F401 once, here: members inherit it
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in self.ranks]
        self._pipes = [ours for ours, _ in pipes]
        options = {"edges": EDGES, "lanes": LANES, "deadline": WAIT, **options}
        self.processes = []
        for index, rank in enumerate(self.ranks):
            domain = tuple(domain_ranks or self.ranks)
            mine = dict(options, **({"host": hosts[index], "interface": "127.0.0.1"} if hosts else {}))
            self.processes.append(context.Process(
                target=_work, args=(kind, rank, domain, str(directory), mine, pipes, index), daemon=True))
            self.processes[-1].start()
        for _, theirs in pipes:
            theirs.close()
        self.opened = self._collect()
        self._pages = {page for page in self.ask(page_of) if page}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for process in self.processes:
            process.kill() if kind is not None else None
        self.left_behind = self.end()

    def ask(self, function, *arguments, only=None) -> list:
        """Results by member; None for those not in `only`, and for those that ended."""
        asked = range(len(self.ranks)) if only is None else only
        for index in asked:
            try:
                self._pipes[index].send((function, arguments))
            except OSError:
                pass  # it has ended
        return self._collect(asked)

    def start(self, function, *arguments) -> None:
        """As `ask`, without waiting: `finish` has the results."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def finish(self) -> list:
        return self._collect()

    def signal(self, index: int, number: int) -> None:
        os.kill(self.processes[index].pid, number)

    def end(self) -> list:
        """Every member closes. Returns what each had not let go of; None for those that had ended."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
        left = self.ask(None)
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join(WAIT)
            assert process.exitcode is not None, "a member does not end"
            pipe.close()
        return left

    def remains(self) -> list[str]:
        """Descriptors of the domain's page that any process of this machine still has, and files of ours in /dev/shm."""
        found = [name for name in os.listdir("/dev/shm") if "rrfp" in name]
        for process in Path("/proc").glob("[0-9]*") if self._pages else ():
            try:
                if process.joinpath("comm").read_text().startswith(("python", "pytest")):
                    found += [str(link) for link in process.joinpath("fd").iterdir()
                              if os.stat(link).st_ino in self._pages and "memfd:rrfp-agreement" in os.readlink(link)]
            except OSError:
                pass  # gone meanwhile
        return found

    def _collect(self, asked=None) -> list:
        until = time.monotonic() + 2 * WAIT
        rows = [None] * len(self.ranks)
        todo = {self._pipes[index]: index for index in (range(len(self.ranks)) if asked is None else asked)}
        while todo:
            ready = wait(list(todo), max(0.0, until - time.monotonic()))
            assert ready, f"members {sorted(todo.values())} gave no answer"
            for pipe in ready:
                index = todo.pop(pipe)
                try:
                    rows[index] = pipe.recv()
                except (EOFError, OSError):
                    pass
        return rows


def _store(kind, directory, members):
    if kind not in COLLECTIVE:
        return FileStore(directory)
    import torch

    Path(directory).mkdir(exist_ok=True)
    return torch.distributed.FileStore(f"{directory}/store", members)


def _work(kind, rank, ranks, directory, options, pipes, index):
    faulthandler.dump_traceback_later(200, exit=True)
    pipe = pipes[index][1]
    for ours, theirs in pipes:  # else nobody would notice the end of another
        ours.close()
        if theirs is not pipe:
            theirs.close()
    before = held()
    end = None
    try:
        agreement = open_agreement(kind, domain=Domain(ranks), rank=rank, store=_store(kind, directory, len(ranks)), **options)
        end = End(kind, agreement, rank, ranks)
        del agreement
        pipe.send(None)
    except Exception as error:
        pipe.send(error)
    while True:
        function, arguments = pipe.recv()
        if function is None:
            break
        try:
            pipe.send(function(end, *arguments))
        except Exception as error:
            pipe.send(error)
    if end is not None:
        end.agreement.close()
        end.agreement.close()
        end = None
        gc.collect()  # its inbox has a descriptor
    pipe.send(sorted(held() - before))


# ---------------------------------------------------------------------- a random workload
def calls_of(seed: int, calls: int) -> list[list[list[tuple[Edge, int]]]]:
    """Per call, per lane: the messages in the order in which the sending stage has dispatched them. The same on every member."""
    rng = random.Random(seed)
    made = []
    for _ in range(calls):
        lanes = []
        for edge in EDGES:
            order = list(range(rng.randint(1, 12)))
            rng.shuffle(order)  # order "free"
            lanes += [[(edge, m) for m in order if m % LANES == lane] for lane in range(LANES)]
        made.append(lanes)
    return made


class Player:
    """A member that receives the messages at random moments, obeys, and (leading) chooses at random among what is common.

    first: the number of the first call. Calls are counted from 0 in what is recorded.
    counted: whether a decision comes only when its message has arrived everywhere. Else a member waits for it, as the engine
        does.
    gathers: every member chooses, by one rule on what has arrived here.
    """

    def __init__(self, agreement, leads: bool, calls, rng: random.Random, *, first: int = 0, now=time.monotonic, counted=True,
                 gathers=False):
        self._agreement, self._calls, self._rng, self._now = agreement, list(calls), rng, now
        self._first, self._counted, self._gathers, self._chooses = first, counted, gathers, leads or gathers
        self.call = -1
        self.log: list[tuple[int, Action]] = []
        self.received: dict[tuple, float] = {}
        """(call, edge, microbatch) -> when it was about to be told."""
        self.common: dict[tuple, float] = {}
        """The same, when it came out as common."""
        self.done = False
        self._left = 0
        self._agreed: Action | None = None
        self._begin()

    def _begin(self) -> None:
        if not self._calls:
            self.done = True
            return
        self.call += 1
        self._agreement.begin(self._first + self.call)
        self._todo = [list(lane) for lane in self._calls.pop(0)]
        self._left = sum(map(len, self._todo))
        self._open: list[tuple[Edge, int]] = []

    def step(self) -> bool:
        """One move. False if this member can only wait for the others."""
        moved = False
        if (lanes := [lane for lane in self._todo if lane]) and self._rng.random() < 0.6:
            edge, microbatch = self._rng.choice(lanes).pop(0)
            self.received[self.call, edge, microbatch] = self._now()
            self._agreement.arrived(edge, microbatch)
            moved = True
        for message in self._agreement.common():
            self.common[(self.call, *message)] = self._now()
            self._open.append(message)
        choice = None
        if self._open and self._chooses and self._rng.random() < 0.7:
            choice = action_of(*(min if self._gathers else self._rng.choice)(self._open))
        if self._agreed is None:
            self._agreed = self._agreement.decide(choice)
        if self._agreed is None:
            return moved or bool(lanes) or (self._chooses and bool(self._open) and choice is None)
        message = (EDGES[self._agreed.kind == "B"], self._agreed.microbatch)
        assert not self._counted or message in self._open, f"{self._agreed} was agreed on before its message was here"
        if message in self._open:
            self._open.remove(message)
            self.log.append((self.call, self._agreed))
            self._agreed = None
            self._left -= 1
            if not self._left:
                self._begin()
        return True


def action_of(edge: Edge, microbatch: int) -> Action:
    return Action("F" if edge == EDGES[0] else "B", 1, microbatch)


def play(end: End, seed: int, calls: int, pause: float):
    """Returns the log, when each message was received, and when it came out as common."""
    rng = random.Random(f"{seed} {end.rank}")
    player = Player(end.agreement, end.leads, calls_of(seed, calls), rng, first=end.call + 1,
                    counted=end.kind not in COLLECTIVE, gathers=end.kind == "all-gather")
    end.call += calls
    while not player.done:
        if rng.random() < 0.1:
            time.sleep(rng.random() * pause)  # members are never in step
        if not player.step():
            end.wait()
    return player.log, player.received, player.common
