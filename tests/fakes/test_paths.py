"""The three ways of a payload to a GPU keep what `rrfp.comm.transport.Transport` promises, on devices that complete when they like."""

import itertools
import random
import threading

import pytest
from fake_cuda import FakeDevice, Machine, Op
from rig import PATHS, WAIT, Rig, together

from rrfp.action import Edge
from rrfp.comm.cuda_ipc import DeviceBuffer, DeviceMappings
from rrfp.comm.host_staged import HostStaged
from rrfp.comm.nccl_transport import NcclTransport
from rrfp.comm.paths import make_transport, settle
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Departure, Failure, Left, Part
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.errors import ConfigurationError, PipelineError

EDGE, BACK = Edge(0, 1), Edge(1, 0)


@pytest.fixture
def rig(machine, tmp_path, seed):
    """rig(choice, **options); closed after the test."""
    made, number = [], itertools.count()

    def make(choice, *, connections=8, **options) -> Rig:
        directory = tmp_path / str(next(number))
        made.append(Rig(machine(seed=seed, connections=connections), directory, choice, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


def test_every_path_is_its_own(rig, path):
    one = rig(path)
    assert isinstance(one[0], {"ipc": ZmqTransport, "host": HostStaged, "nccl": NcclTransport}[path])
    assert set(one.paths.values()) == {path}


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("shared_device", [False, True])
def test_bytes_arrive_in_order_in_both_directions(rig, path, seed, connections, shared_device):
    """Every size, buffers that grow, a buffer read by a kernel that runs after the host has let go of it."""
    if path == "nccl" and shared_device:
        pytest.skip("NCCL refuses two ranks on one device")
    rng, one = random.Random(seed), rig(path, connections=connections, shared_device=shared_device, credits=2)
    seen = {0: [], 1: []}
    for call in range(2):
        one.begin(call)
        sizes = [rng.choice([0, 1, 63, 4097, 50_000]) for _ in range(8)]
        for microbatch, size in enumerate(sizes):
            one[0].send(EDGE, microbatch, (one.part(0, size, microbatch), one.part(0, 5, microbatch + 1)))
            one[1].send(BACK, microbatch, (one.part(1, size + 1, microbatch + 7), Part("float32", (2,), None)))
        for microbatch, size in enumerate(sizes):
            for rank, first in ((1, bytes([microbatch]) * size), (0, bytes([microbatch + 7]) * (size + 1))):
                arrival = one.get(rank)
                assert (arrival.call, arrival.microbatch, arrival.lane) == (call, microbatch, 0)
                device = one.devices[rank]
                device.enter()
                device.kernel(lambda arrival=arrival, rank=rank, first=first: seen[rank].append(bytes(arrival.payload[0].data) == first))
                one[rank].consumed(arrival)
                one[rank].release(arrival)  # the kernel has perhaps not run
        together(*[lambda rank=rank: one[rank].flush(deadline=WAIT) for rank in range(2)])
        for device in one.devices:
            device.enter()
            device.synchronize(device.record(device.compute))
    assert all(seen[0]) and all(seen[1]) and len(seen[0]) == len(seen[1]) == 16


def overtaken(one) -> int:
    """How often a message lands in a buffer that a kernel has still to read. One credit: it can only be that buffer, or a new one."""
    device, gate, wrong = one.devices[1], [], 0
    for call in range(3):
        one.begin(call)
        reads, gate[:] = [], []
        for microbatch in range(2):
            one[0].send(EDGE, microbatch, (one.part(0, 4096, 10 + microbatch),))
        first = one.get(1)
        device.machine.queue(device.compute, Op("gate", may_start=lambda: bool(gate)))
        device.kernel(lambda first=first, reads=reads: reads.append(int(first.payload[0].data[0])))
        one[1].release(first)
        one[1].consumed(first)
        second = one.get(1)
        with device.machine.changed:
            gate.append(True)
            device.machine.changed.notify_all()
        device.synchronize(device.record(device.compute))
        wrong += reads != [10]
        one[1].consumed(second)
        one[1].release(second)
    return wrong


def test_a_buffer_is_reused_after_its_event(rig, path, monkeypatch):
    """Negative control: without the event, messages land in buffers that are still to be read."""
    assert overtaken(rig(path, credits=1)) == 0
    monkeypatch.setattr(DeviceBuffer, "busy", False)
    assert overtaken(rig(path, credits=1)) > 0


def test_credits_bound_what_is_outstanding(rig, path):
    one = rig(path, credits=2)
    one.begin()
    for microbatch in range(4):
        one[0].send(EDGE, microbatch, (one.part(0, 64, microbatch),))
    held = [one.get(1) for _ in range(2)]
    assert one[0].state()["edges"]["0>1"]["waiting"] == 2 and one.boxes[1].empty()
    one[1].consumed(held[0])
    assert one.get(1).microbatch == 2


def test_what_has_left_is_told(rig, path):
    one = rig(path)
    one.begin()
    one[0].send(EDGE, 0, (one.part(0, 100, 1),), tell=True)
    assert one.get(1).microbatch == 0
    assert one.get(0, Left) == Left(0, EDGE)


def test_a_goodbye_comes_after_the_last_message(rig, path):
    one = rig(path)
    one.begin()
    for microbatch in range(3):
        one[0].send(EDGE, microbatch, (one.part(0, 3000, microbatch),))
    taken = [one.get(1) for _ in range(3)]
    one[0].flush(deadline=WAIT)
    together(lambda: one[0].close(deadline=WAIT), lambda: one.get(1, Departure))
    assert [arrival.microbatch for arrival in taken] == [0, 1, 2]
    one[0].close(deadline=WAIT)  # twice is fine


def test_an_error_of_the_device_is_a_failure_on_both_ends(rig, path):
    one = rig(path)
    one.begin()
    part = one.part(0, 5000, 1)
    one.machine.break_down("CUDA error: an illegal memory access was encountered")
    one[0].send(EDGE, 0, (part,))
    for rank in range(2):
        failure = one.get(rank, Failure)
        assert "illegal memory access" in failure.text and "Traceback" in failure.traceback
    with pytest.raises(PipelineError, match="did not leave"):
        one[0].flush(deadline=WAIT)


def test_a_failure_that_is_told_ends_waits(rig, path):
    one = rig(path)
    one.begin()
    one[1].abort(Failure(1, "1F0", "as told"))
    assert one.get(0, Failure).text == "as told"


def test_no_room_on_the_device_names_the_way_out(rig, path, monkeypatch):
    one = rig(path)
    one.begin()

    def full(self, nbytes):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore lines")

    part = one.part(0, 5000, 1)
    monkeypatch.setattr(FakeDevice, "allocate", full)
    one[0].send(EDGE, 0, (part,))
    text = one.get(0, Failure).text
    assert "no receive buffer of" in text and "out of memory" in text and "--rrfp-limit" in text and "more lines" not in text


def test_a_wrong_payload_is_refused(rig, path):
    one = rig(path)
    one.begin()
    with pytest.raises(ValueError, match="dtype"):
        one[0].send(EDGE, 0, (Part("float7", (8,), None),))


def test_a_forked_child_lets_go_of_nothing(rig, path, monkeypatch):
    one = rig(path)
    one.begin()
    one[0].send(EDGE, 0, (one.part(0, 100, 1),))
    arrival = one.get(1)
    monkeypatch.setattr("os.getpid", lambda: -1)
    one[1].release(arrival)
    monkeypatch.undo()
    one[1].release(arrival)
    if path == "ipc":
        with pytest.raises(PipelineError, match="released twice"):
            one[1].release(arrival)


# ------------------------------------------------------------------ which path
def test_auto_takes_the_host_where_memory_cannot_be_opened(rig):
    one = rig("auto", ranks=3, hosts={0: "a", 1: "a", 2: "b"})
    assert {str(edge): path for edge, path in one.paths.items()} == {"0>1": "ipc", "1>0": "ipc", "1>2": "host", "2>1": "host"}
    one.begin()
    one[0].send(EDGE, 0, (one.part(0, 100, 1),))
    one[1].send(Edge(1, 2), 0, (one.part(1, 100, 2),))
    one[1].send(BACK, 0, (one.part(1, 100, 3),))
    arrivals = [one.get(rank) for rank in (1, 2, 0)]
    assert [one.read(rank, arrival)[0][0] for rank, arrival in zip((1, 2, 0), arrivals, strict=True)] == [1, 2, 3]
    for rank, arrival in zip((1, 2, 0), arrivals, strict=True):
        one[rank].consumed(arrival)
        one[rank].release(arrival)
    assert set(rig("auto", reachable=False).paths.values()) == {"host"}


def test_ipc_is_refused_where_it_cannot_be(rig):
    with pytest.raises(ConfigurationError, match="--rrfp-transport ipc: edge 0>1 .* different hosts; take --rrfp-transport auto"):
        rig("ipc", hosts={0: "a", 1: "b"})
    with pytest.raises(ConfigurationError, match="can't be shared"):
        rig("ipc", reachable=False)


def test_memory_that_is_another_is_seen(rig, monkeypatch):
    monkeypatch.setattr(FakeDevice, "open", lambda self, handle: self.allocate(64))
    assert set(rig("auto").paths.values()) == {"host"}


def test_settling_is_pure():
    edges, owner = [EDGE, BACK], {0: 0, 1: 1}
    one_way = {(0, 1): "", (1, 0): "no"}
    assert settle("auto", edges=edges, owner=owner, reach=one_way) == {EDGE: "ipc", BACK: "host"}
    assert settle("host", edges=edges, owner=owner, reach={}) == dict.fromkeys(edges, "host")
    with pytest.raises(ConfigurationError, match="edge 1>0"):
        settle("ipc", edges=edges, owner=owner, reach=one_way)


def test_without_a_device_it_is_the_cpu_transport(tmp_path):
    paths = {EDGE: "host", BACK: "host"}
    made = make_transport(paths, None, rank=0, owner={0: 0, 1: 1}, store=FileStore(tmp_path))
    assert type(made) is ZmqTransport


@pytest.mark.parametrize("path", ["host", "nccl"])
def test_a_rank_that_does_not_come_leaves_no_thread(machine, tmp_path, path):
    before = set(threading.enumerate())
    one = machine()
    made = make_transport({EDGE: path, BACK: path}, FakeDevice(one), rank=0, owner={0: 0, 1: 1}, store=FileStore(tmp_path), interface="127.0.0.1",
                          nccl=lambda: None)
    with pytest.raises(PipelineError, match="rank 1 did not come"):
        made.open(lambda event: None, deadline=0.05)
    one.stop()
    assert set(threading.enumerate()) <= before


# ------------------------------------------------------------------ memory that is opened
def test_slots_that_cannot_be_what_they_say():
    machine = Machine()
    owner, sender = FakeDevice(machine, 0), FakeDevice(machine, 1)
    mappings, buffer = DeviceMappings(sender), DeviceBuffer(owner, 1, 100, share=True)
    data = sender.allocate(10)
    mappings.write(buffer.grant(), [0], [data])
    with pytest.raises(PipelineError, match="--rrfp-transport host"):
        mappings.write(buffer.grant()._replace(slot=2, handle=b"gone"), [0], [data])
    with pytest.raises(PipelineError, match="has 100 on the other GPU"):
        mappings.write(buffer.grant()._replace(slot=3, size=1000), [0], [data])


def test_few_slots_are_kept_open(monkeypatch):
    monkeypatch.setattr("rrfp.comm.cuda_ipc.MAX_MAPPED", 3)
    machine = Machine()
    owner, sender = FakeDevice(machine, 0), FakeDevice(machine, 1)
    mappings, data = DeviceMappings(sender), sender.allocate(10)
    for slot in range(5):
        mappings.write(DeviceBuffer(owner, slot, 100, share=True).grant(), [0], [data])
    assert len(mappings._opened) == 3
    mappings.write(DeviceBuffer(owner, 9, 200, share=True).grant(), [0], [data])
    assert list(mappings._opened) == [9]  # the receiver's buffers have grown
    mappings.close()
    assert not mappings._opened
