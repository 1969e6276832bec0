"""The two files that call torch's CUDA and NCCL, as far as a machine without a GPU takes them: arguments, shapes, errors.

`torch.cuda`'s streams and events are stand-ins, memory is the host's, and process groups are gloo's under NCCL's name. This shows that
calls are well formed, not what a GPU makes of them.
"""

import contextlib
import struct
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rig import together

from rrfp.action import Edge
from rrfp.comm import cuda, nccl
from rrfp.errors import ConfigurationError

EDGE = Edge(0, 1)


class Stream:
    def __init__(self, index=None, priority=0):
        self.priority = priority


class Event:
    def __init__(self, *, enable_timing, blocking):
        assert enable_timing and blocking
        self.recorded = False

    def record(self, stream):
        self.recorded = True

    def query(self):
        return self.recorded

    def synchronize(self):
        assert self.recorded

    def elapsed_time(self, other):
        return 2.0


@pytest.fixture
def device(monkeypatch):
    slept = []
    fake = {
        "current_device": lambda: 0, "current_stream": lambda index: Stream(), "Stream": Stream, "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(), "set_device": lambda index: slept.append(("set", index)), "_sleep": slept.append,
        "get_device_properties": lambda index: SimpleNamespace(clock_rate=1000),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    empty = torch.empty

    def on_the_host(*arguments, device=None, pin_memory=False, **options):
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", on_the_host)
    made = cuda.CudaDevice()
    made.said = slept
    return made


def test_memory_slices_share_and_say_where_they_are(device):
    memory = device.allocate(100)
    piece = memory[10:20][2:]
    assert (len(memory), piece.nbytes, memory[90:200].nbytes, memory[5:2].nbytes) == (100, 8, 10, 0)
    piece.view().fill_(7)
    assert memory.view()[12:20].tolist() == [7] * 8
    place = piece.__cuda_array_interface__
    assert place["data"][0] == memory.view().data_ptr() + 12 and place["shape"] == (8,) and place["typestr"] == "|u1"
    assert device.memory_of(torch.ones(3)).nbytes == 12


def test_copies_events_times_and_delays(device):
    memory, host = device.allocate(4), device.pinned(4)
    host[:] = [1, 2, 3, 4]
    stream = device.stream()
    assert stream.priority == -1 and isinstance(host, np.ndarray)
    device.copy(memory, host, stream)
    back = device.pinned(4)
    device.copy(back, memory, stream)
    assert back.tolist() == [1, 2, 3, 4]
    start, end = device.record(stream), device.record(stream)
    device.synchronize(end)
    assert device.done(end) and device.seconds(start, end) == 2e-3
    device.delay(0.5, stream)
    device.enter()
    assert device.said == [500_000, ("set", 0)]


def test_a_handle_comes_back_as_it_went(device, monkeypatch):
    seen = []

    class Storage:
        def _share_cuda_(self):
            return 0, b"h" * 66, 64, 512, b"counter", 3, b"e" * 64, True

    memory = device.allocate(64)
    memory._base = SimpleNamespace(untyped_storage=Storage, numel=lambda: 64)

    def opened(*arguments):
        seen.append(arguments)
        return torch.UntypedStorage(64)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    assert device.open(device.share(memory)).nbytes == 64
    assert seen == [(0, b"h" * 66, 64, 512, b"counter", 3, b"e" * 64, True)]


def test_what_cannot_be_shared_or_opened_is_an_os_error(device, monkeypatch):
    class Storage:
        def _share_cuda_(self):
            raise RuntimeError("invalid argument")

    memory = device.allocate(4)
    memory._base = SimpleNamespace(untyped_storage=Storage, numel=lambda: 4)
    with pytest.raises(OSError, match="can't be shared"):
        device.share(memory)

    def refused(*arguments):
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refused)
    for handle in (b"short", struct.pack("<QQQ?HHH", 4, 0, 0, False, 1, 1, 1) + b"abc"):
        with pytest.raises(OSError, match="can't be opened here"):
            device.open(handle)


# ------------------------------------------------------------------ NCCL
class Group(torch.distributed.ProcessGroupGloo):
    """gloo with NCCL's constructor and its three calls of its own."""

    class Options:
        def __init__(self, *, is_high_priority_stream):
            assert is_high_priority_stream

    aborted: list = []

    def __init__(self, store, rank, size, options):
        assert options._timeout.total_seconds() == 3600.0, "torch's watchdog would end the process before the engine's report"
        super().__init__(store, rank, size, timedelta(seconds=10.0))

    def abort(self):
        self.aborted.append(self)

    def _group_start(self):
        self.aborted.append("start")

    def _group_end(self):
        self.aborted.append("end")


def test_a_transfer_over_torchs_groups(device, monkeypatch, tmp_path):
    monkeypatch.setattr(nccl, "ProcessGroupNCCL", Group)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *arguments, device=None, **options: zeros(*arguments, **options))
    # gloo's work does not know that it has completed before somebody waits.
    monkeypatch.setattr(nccl, "_wait", lambda works, timeout: [work.wait() for work in works])
    Group.aborted.clear()

    def rank(index):
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        end = nccl.TorchNccl(index, store, device, timeout=10.0, patience=3600.0)
        end.abort()  # nothing is connected
        end.connect(EDGE, (0, 1))
        memory = device.allocate(1000)
        memory.view().fill_(9 if index == 0 else 0)
        (end.send if index == 0 else end.recv)(EDGE, memory, 1 - index, device.stream())
        end.finish(EDGE, None)()
        end.abort()
        return int(memory.view().sum())

    assert together(lambda: rank(0), lambda: rank(1)) == [9000, 9000]
    assert Group.aborted.count("start") == Group.aborted.count("end") == 2 and len(Group.aborted) == 6


def test_a_work_is_asked_until_it_is_done():
    answers = [False, False, True]
    work = SimpleNamespace(is_completed=lambda: answers.pop(0), wait=lambda: answers.append("waited"))
    nccl._wait([work], None)
    assert answers == ["waited"]
    with pytest.raises(RuntimeError, match="did not come in time"):
        nccl._wait([SimpleNamespace(is_completed=lambda: False)], -1.0)


def test_the_launch_order_is_set_or_refused(monkeypatch):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    with pytest.raises(ConfigurationError, match="NCCL_LAUNCH_ORDER_IMPLICIT=0"):
        nccl.check_environment()
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    nccl.check_environment()
    import os

    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
