"""A long engine-only job on real processes: every message's bytes, and nothing that grows. docs/soak.md has the figures."""

import mmap
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/
from benchmarks import soak  # noqa: E402
from benchmarks.soak_job import LARGEST, LAYOUTS, CheckingExecutor, Contents, Layout  # noqa: E402
from rrfp.action import Action, Edge  # noqa: E402
from rrfp.comm.transport import Arrival, Part  # noqa: E402
from rrfp.scheduler.dependencies import Task  # noqa: E402

EDGE = Edge(0, 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, most", [("pp", 10_000), ("chunks", 10_000), ("domains", 10_000), ("domains-messages", 1000)])
def test_nothing_grows(name, most, full, seed, capsys):
    iterations = most if full else soak.LEAST
    result = soak.soak(LAYOUTS[name], iterations=iterations, seed=seed)
    with capsys.disabled():
        print(f"\n{name}, seed {seed}: {iterations} iterations in {result.seconds:.0f} s, {result.messages} messages")
        print("\n".join(result.table()))
    assert not result.wrong()
    assert {process["calls"] for process in result.samples[-1]} == {iterations}
    assert max(result.peaks) > 1 and result.messages > 4 * iterations


# ---------------------------------------------------------------------- controls: what grows is seen
def a_descriptor(leaked: list) -> None:
    leaked.append(os.open(os.devnull, os.O_RDONLY))


def four_kilobytes(leaked: list) -> None:
    # Not from the heap: the processes are forks, and what this one has freed would be used first.
    leaked.append(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    leaked[-1][0] = 1


def a_thread(leaked: list) -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()


def of_every_kind(leaked: list) -> None:
    leaked.append(os.memfd_create("leaked"))
    os.ftruncate(leaked[-1], 4 * mmap.PAGESIZE)
    leaked.append(mmap.mmap(leaked[-1], 4 * mmap.PAGESIZE))
    leaked.append(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR))  # without a name, so that nothing is left there
    leaked += [(number,) for number in range(100)]


LEAKS = [
    (a_descriptor, {"descriptors"}, set()),
    (four_kilobytes, {"anonymous memory"}, set()),
    (a_thread, {"threads", "anonymous memory"}, {"objects"}),
    (of_every_kind, {"descriptors", "memory files", "their bytes", "mappings of them", "/dev/shm", "objects"},
     {"anonymous memory"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def leaking(full):
    """leaking(number of a leak, seed): what was seen of a job, and which of its processes leak so. Reduced, each leaks in a way of its own."""
    results = {}

    def run(number, seed):
        key = number if full else None
        if key not in results:
            layout = Layout(2 if full else len(LEAKS))
            results[key] = soak.soak(layout, iterations=200, seed=seed, leak=lambda process, kept: LEAKS[number if full else process][0](kept))
            print("\n".join(results[key].table()))
        return results[key], results[key].processes if full else [number]

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(len(LEAKS)), ids=[leak.__name__ for leak, _, _ in LEAKS])
def test_a_leak_in_every_iteration_is_seen(leaking, number, seed):
    _, grows, may_grow = LEAKS[number]
    result, processes = leaking(number, seed)
    for process in processes:
        mine = [what.removeprefix(f"process {process}: ") for what in result.wrong() if what.startswith(f"process {process}: ")]
        assert grows <= {what.partition(" grew by ")[0] for what in mine} <= grows | may_grow, result.wrong()


def test_growth_is_a_trend():
    assert soak.growth([5.0] * 40) == 0
    assert soak.growth([1.0] * 9 + [5.0] * 31) == 0, "warm-up"
    assert soak.growth([5.0] * 35 + [90.0] + [5.0] * 4) == 0, "a single peak"
    assert soak.growth([0.0] * 10 + [5.0, 6.0] * 15) < 0.5, "noise"
    assert soak.growth([float(number) for number in range(40)]) == pytest.approx(20)
    assert soak.growth([0.0] * 25 + [1.0] * 15) > 0.9, "a step that stays"


# ---------------------------------------------------------------------- controls: other bytes are seen
class Buffers:
    """An arrival with memory of its own, as the transport hands it out."""

    def __init__(self, contents: Contents, call: int, microbatch: int):
        sent = contents.of(call, EDGE, microbatch)
        payload = tuple(Part(dtype, shape, None if data is None else data.copy()) for dtype, shape, data in sent)
        self.arrival = Arrival(call, EDGE, 0, microbatch, payload, 0.0)


@pytest.mark.parametrize("what", ["nothing", "a byte", "another message", "another call", "a part less"])
def test_other_contents_are_refused(what, seed):
    contents = Contents(seed)
    arrival = Buffers(contents, 7, 3).arrival
    if what == "a byte":
        arrival.payload[0].data[-1] ^= 1
    elif what == "another message":
        arrival.microbatch = 4
    elif what == "another call":
        arrival.call = 8
    elif what == "a part less":
        arrival.payload = arrival.payload[1:]
    if what == "nothing":
        return contents.check(7, arrival)
    with pytest.raises(ValueError, match="call 7: the message of call . on edge 0>1 for microbatch . has other contents than"):
        contents.check(7, arrival)


def test_a_live_input_that_is_written_is_seen(seed):
    """A buffer that was given back while its backward had still to read it."""
    contents, released, outputs = Contents(seed), [], []
    executor = CheckingExecutor(7, contents, duration=lambda: 0.0, release=released.append)
    arrivals = [Buffers(contents, 7, microbatch).arrival for microbatch in (0, 1)]
    for microbatch, arrival in enumerate(arrivals):
        executor.launch(Task(Action("F", 1, microbatch), in_flight=1, sends=(Edge(1, 2),)), (arrival,), outputs.append)
    executor.launch(Task(Action("B", 1, 0), in_flight=-1), (), outputs.append)
    assert released == arrivals[:1] and len(outputs) == 3
    arrivals[1].payload[0].data[:] += 1
    with pytest.raises(ValueError, match="edge 0>1 for microbatch 1 has other contents"):
        executor.launch(Task(Action("B", 1, 1), in_flight=-1), (), outputs.append)


def test_messages_differ_in_size_and_shape(seed):
    contents = Contents(seed)
    messages = [contents.of(call, EDGE, microbatch) for call in range(100) for microbatch in range(3)]
    sizes = [sum(part.data.nbytes for part in message if part.data is not None) for message in messages]
    assert min(sizes) < 100 < LARGEST // 2 < max(sizes) <= LARGEST
    assert {len(message) for message in messages} == {1, 2, 3}
    assert any(part.data is None for message in messages for part in message)
    again = Contents(seed).of(3, EDGE, 1)
    same = contents.of(3, EDGE, 1)
    assert [part.shape for part in same] == [part.shape for part in again]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(same, again, strict=True) if a.data is not None)
