"""GPUs that are as strict as real ones, in one process: streams and events that complete out of the host's sight, memory shared by handle.

A `Machine` holds all devices; a `FakeDevice` is one process' use of one, an `rrfp.comm.device.Device`. What is queued happens later: a
copy reads and writes when its stream gets to it, in an order that dice choose among all that may go on. Memory starts as poison, host
memory must be pinned, a thread must have entered the device, a handle can't be opened by who made it, or after its owner has freed it.

connections=1: one hardware queue. Nothing starts before all that was queued earlier on the device, on any stream, has started.

pace: seconds that an entry of a compute stream takes at least, so that hosts and transfers run ahead of it.

Without `start` the machine runs when somebody waits (`synchronize`, `run`); a wait that nothing can end is a `Deadlock`, at once. With
it a thread runs it, and whoever waits meets a `Deadlock` when for `wait` seconds nothing was queued and nothing could go on. Seconds in
which this process was not let run don't count: on a busy machine hosts are slow, and a slow host is no deadlock.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

POISON = 0xA5
WAIT = 8.0
TICK = 0.02
"""Seconds between looks of an idle machine. A look that comes late counts as one."""


class Deadlock(AssertionError):
    """What waits for what."""


class FakeMemory(np.ndarray):
    """Bytes of a device."""

    def tensor(self):
        import torch

        return torch.from_numpy(self)


class PinnedMemory(np.ndarray):
    """Bytes of the host that streams can reach."""


class FakeEvent:
    def __init__(self, stream):
        self.stream, self.complete, self.time = stream, False, None


class Op:
    """One entry of a stream. may_start: looked at when it is the stream's first; finished: when it has started."""

    def __init__(self, what: str, action: Callable[[], None] = lambda: None, *, may_start=lambda: True, finished=lambda: True):
        self.what, self.action, self.may_start, self.finished = what, action, may_start, finished
        self.started = False


class FakeStream:
    def __init__(self, device, name: str):
        self.device, self.name, self.kernels = device, name, name.endswith("compute")
        self.next_kernel = 0.0
        self.ops: deque[Op] = deque()


class Machine:
    """All devices and what they do. Times are virtual: `now` counts what has been done, and delays."""

    def __init__(self, *, seed: int = 0, connections: int = 8, wait: float = WAIT, pace: float = 0.0):
        self.wait, self.pace = wait, pace
        self.rng = random.Random(seed)
        self.connections = connections
        self.changed = threading.Condition(threading.RLock())
        self.now = 0.0
        self.idle = 0.0
        """Seconds since something was queued or went on."""
        self.streams: list[FakeStream] = []
        self.handles: dict[bytes, tuple[object, FakeMemory]] = {}
        self.launches: dict[object, list[Op]] = {}
        """By device: what has been queued and not started, in that order."""
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.broken: str | None = None

    # ------------------------------------------------------------------ what happens on the devices
    def queue(self, stream: FakeStream, op: Op) -> None:
        with self.changed:
            self.idle = 0.0
            stream.ops.append(op)
            self.launches.setdefault(stream.device.index, []).append(op)
            self.changed.notify_all()

    def step(self) -> bool:
        """Let one stream get on. False if none can."""
        with self.changed:
            streams = [stream for stream in self.streams if stream.ops]
            self.rng.shuffle(streams)
            return any(self._advance(stream) for stream in streams)

    def _advance(self, stream: FakeStream) -> bool:
        op = stream.ops[0]
        if self.pace and stream.kernels:
            if time.monotonic() < stream.next_kernel:
                return False
            stream.next_kernel = time.monotonic() + self.pace
        if not op.started:
            waiting = self.launches[stream.device.index]
            if (self.connections == 1 and waiting[0] is not op) or not op.may_start():
                return False
            waiting.remove(op)
            op.started = True
            op.action()
        elif not op.finished():
            return False
        if op.finished():
            stream.ops.popleft()
        self.now += 1e-6
        self.idle = 0.0
        self.changed.notify_all()
        return True

    def run(self) -> None:
        """Until nothing is left. Raises Deadlock."""
        while self.step():
            pass
        if stuck := self.stuck():
            raise Deadlock("; ".join(stuck))

    def stuck(self) -> list[str]:
        with self.changed:
            return [f"{stream.name}: {', '.join(op.what + (' (started)' if op.started else '') for op in stream.ops)}"
                    for stream in self.streams if stream.ops]

    # ------------------------------------------------------------------ who runs it
    def start(self) -> "Machine":
        self._thread = threading.Thread(target=self._loop, name="fake-gpu", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(WAIT)
            assert not self._thread.is_alive()

    def _loop(self) -> None:
        with self.changed:
            while not self._stopped:
                if not self.step():
                    began, pause = time.monotonic(), self.pace or TICK
                    self.changed.wait(pause)
                    self.idle += min(pause, time.monotonic() - began)
                elif self.rng.random() < 0.3:
                    self.changed.wait(0)  # hosts get a word in

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        with self.changed:
            while not condition() and self.broken is None:
                if not self.step() if self._thread is None else self.idle >= self.wait:
                    raise Deadlock(f"{what} waits for ever: {'; '.join(self.stuck())}")
                if self._thread is not None:
                    self.changed.wait(TICK)
            if self.broken is not None:
                raise RuntimeError(self.broken)

    def break_down(self, text: str) -> None:
        """From now on every wait is an error, as after a fault of the device."""
        with self.changed:
            self.broken = text
            self.changed.notify_all()


class FakeDevice:
    """One process' use of a GPU. Several processes may use one GPU: same `index`."""

    def __init__(self, machine: Machine, index: int = 0, *, process: object = None, reachable: bool = True):
        self.machine, self.index, self.process = machine, index, index if process is None else process
        self.reachable = reachable
        self.waits = 0
        self._threads: set[int] = set()
        self._handle = 0
        self._names = 0
        self.enter()
        self.compute = self.stream("compute")

    def enter(self) -> None:
        self._threads.add(threading.get_ident())

    def _check(self) -> None:
        assert threading.get_ident() in self._threads, f"{threading.current_thread().name} uses a device that it has not entered"

    def allocate(self, nbytes: int) -> FakeMemory:
        self._check()
        memory = np.full(nbytes, POISON, np.uint8).view(FakeMemory)
        return memory

    def memory_of(self, tensor) -> FakeMemory:
        """The bytes that the tensor has once the compute stream gets here: until then they are poison."""
        import torch

        memory = np.full(tensor.nbytes, POISON, np.uint8).view(FakeMemory)
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().copy()
        self.machine.queue(self.compute, Op("compute", lambda: np.copyto(memory, data)))
        return memory

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, POISON, np.uint8).view(PinnedMemory)

    def stream(self, name: str | None = None) -> FakeStream:
        self._names += 1
        stream = FakeStream(self, f"process {self.process} {name or f'stream {self._names}'}")
        with self.machine.changed:
            self.machine.streams.append(stream)
        return stream

    def copy(self, to, source, stream: FakeStream) -> None:
        self._check()
        for end in (to, source):
            assert isinstance(end, FakeMemory | PinnedMemory), f"a copy of pageable memory ({type(end).__name__}) waits for the device"
        assert len(to) == len(source), f"{len(source)} bytes to {len(to)}"
        self.machine.queue(stream, Op("copy", lambda: np.copyto(to, source)))

    def kernel(self, action: Callable[[], None], stream: FakeStream | None = None, what: str = "kernel") -> None:
        """Run `action` when the stream gets to it."""
        self._check()
        self.machine.queue(stream or self.compute, Op(what, action))

    def delay(self, seconds: float, stream: FakeStream) -> None:
        def pass_time():
            self.machine.now += seconds

        self.machine.queue(stream, Op("delay", pass_time))

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(stream)

        def complete():
            event.complete, event.time = True, self.machine.now

        self.machine.queue(stream, Op("record", complete))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """The stream waits. Not in the protocol, since nothing here may do it; for negative controls."""
        self.machine.queue(stream, Op("wait for an event", may_start=lambda: event.complete))

    def done(self, event: FakeEvent) -> bool:
        with self.machine.changed:
            return event.complete

    def synchronize(self, event: FakeEvent) -> None:
        self._check()
        self.waits += 1
        self.machine.wait_for(lambda: event.complete, f"the host of {event.stream.name}")

    def seconds(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.complete and end.complete, "the time of an event that is not complete"
        return end.time - start.time

    def share(self, memory: FakeMemory) -> bytes:
        self._check()
        if not self.reachable:
            raise OSError("this GPU's memory can't be shared")
        self._handle += 1
        handle = f"{self.process}/{self._handle}".encode().ljust(64, b"\0")
        with self.machine.changed:
            self.machine.handles[handle] = (self.process, memory)
        return handle

    def open(self, handle: bytes) -> FakeMemory:
        self._check()
        with self.machine.changed:
            owner, memory = self.machine.handles.get(bytes(handle), (None, None))
        if memory is None or not self.reachable:
            raise OSError("no such memory")
        if owner == self.process:
            raise OSError("the handle's own process can't open it")
        return memory
