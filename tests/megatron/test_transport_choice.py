"""Which way a pipeline's payloads take, what NCCL asks of all ranks alike, and what is refused beside it. Fake GPUs, one process."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent.parent / "fakes"))

from fake_cuda import FakeDevice, Machine  # noqa: E402
from rig import WAIT, together  # noqa: E402

import rrfp.megatron as plugin  # noqa: E402
from rrfp.action import Edge  # noqa: E402
from rrfp.comm import cuda, nccl  # noqa: E402
from rrfp.comm.nccl_transport import NcclTransport  # noqa: E402
from rrfp.comm.rendezvous import FileStore  # noqa: E402
from rrfp.comm.zmq_transport import ZmqTransport  # noqa: E402
from rrfp.errors import ConfigurationError  # noqa: E402
from rrfp.megatron import cpu  # noqa: E402
from rrfp.megatron.device import check_overlap, device_facts, find_device, transport_for  # noqa: E402
from rrfp.megatron.options import Options  # noqa: E402
from rrfp.tp_coord.domain import Domain  # noqa: E402

EDGES = [Edge(0, 1), Edge(1, 0)]


# ------------------------------------------------------------------ the device
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_path_of_gpus_is_refused_on_the_cpu(monkeypatch, transport):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(Options()) is None
    with pytest.raises(ConfigurationError, match=f"--rrfp-transport {transport}: .* runs on the CPU; use auto"):
        find_device(Options(transport=transport))


def test_in_cpu_mode_the_gpu_that_torch_pretends_to_have_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "CudaDevice", lambda: "the GPU")
    monkeypatch.setattr(cpu, "is_enabled", lambda: False)
    assert find_device(Options()) == "the GPU"
    monkeypatch.setattr(cpu, "is_enabled", lambda: True)
    assert find_device(Options()) is None


# ------------------------------------------------------------------ the way
@pytest.fixture
def machine():
    one = Machine().start()
    yield one
    one.stop()


def opened(machine, folder, options, *, reachable=True) -> list:
    """Both ranks' transports, made as a runtime makes them."""
    store = FileStore(folder)
    devices = [FakeDevice(machine, rank, reachable=reachable) for rank in range(2)]

    def make(rank):
        devices[rank].enter()
        return transport_for(options, device=devices[rank], edges=EDGES, rank=rank, owner={0: 0, 1: 1}, store=store, leads=True,
                             until=time.monotonic() + WAIT, interface="127.0.0.1", host="here")

    return together(*[lambda rank=rank: make(rank) for rank in range(2)])


@pytest.mark.parametrize("reachable, said", [(True, "the copy engine (CUDA IPC)"), (False, "host memory")])
def test_rank_0_says_which_way_was_found_to_work(machine, tmp_path, capsys, reachable, said):
    opened(machine, tmp_path, Options(run_ahead=2), reachable=reachable)
    assert capsys.readouterr().err == f"[rrfp] what stages send each other goes by {said}; --rrfp-run-ahead 2\n"


def test_where_ways_differ_the_edges_are_named(machine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(FakeDevice, "reachable", property(lambda self: self.index == 1, lambda self, value: None), raising=False)
    monkeypatch.setattr(FakeDevice, "open", lambda self, handle: self.machine.handles[bytes(handle)][1])
    opened(machine, tmp_path, Options())
    assert capsys.readouterr().err == "[rrfp] what stages send each other goes by the copy engine (CUDA IPC): 0>1; host memory: 1>0; --rrfp-run-ahead 1\n"


def test_without_a_device_nothing_is_tried(tmp_path):
    made = transport_for(Options(), device=None, edges=EDGES, rank=0, owner={0: 0, 1: 1}, store=FileStore(tmp_path), leads=True, until=0.0)
    assert type(made) is ZmqTransport


def test_nccl_is_made_with_deadlines_behind_the_engines(machine, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(nccl, "TorchNccl", lambda rank, store, device, **seconds: made.append((rank, seconds)))
    assert all(isinstance(each, NcclTransport) for each in opened(machine, tmp_path, Options(transport="nccl", timeout=100.0)))
    for rank, seconds in sorted(made, key=lambda one: one[0]):
        assert 1.0 <= seconds["timeout"] <= WAIT and seconds["patience"] >= 3 * 100.0, (rank, seconds)


# ------------------------------------------------------------------ what NCCL asks for
def test_facts_that_ranks_must_share_for_nccl_only():
    domain = Domain((4, 5))
    assert device_facts(Options(), domain, 5) == {}
    facts = device_facts(Options(transport="nccl"), domain, 5)
    assert [fact.value for fact in facts.values()] == [2, 1] and all("--rrfp-transport auto" in fact.way_out for fact in facts.values())


def test_an_agreement_without_a_leader_is_refused_beside_nccl():
    with pytest.raises(ConfigurationError, match="--rrfp-agreement all-gather with --rrfp-transport nccl: .*; use --rrfp-agreement auto"):
        device_facts(Options(transport="nccl", agreement="all-gather"), Domain((0, 1)), 0)
    assert device_facts(Options(transport="nccl", agreement="all-gather"), Domain((0,)), 0)


OVERLAPS = SimpleNamespace(overlap_grad_reduce=True, overlap_param_gather=False)


def test_collectives_of_replicas_at_places_that_nobody_agrees_on_are_refused_beside_nccl():
    with pytest.raises(ConfigurationError, match="--rrfp-transport nccl with --overlap-grad-reduce and 2 chunks per rank: .*; use --rrfp-transport "
                                                 "auto, or leave --overlap-grad-reduce out"):
        check_overlap(Options(transport="nccl"), OVERLAPS, chunks=2, alone=False)
    with pytest.raises(ConfigurationError, match="--overlap-param-gather"):
        check_overlap(Options(transport="nccl"), SimpleNamespace(overlap_param_gather=True), chunks=2, alone=False)


@pytest.mark.parametrize("transport, overlaps, chunks, alone", [
    ("nccl", OVERLAPS, 1, False), ("nccl", OVERLAPS, 2, True), ("nccl", None, 2, False), ("nccl", SimpleNamespace(overlap_grad_reduce=False), 2, False),
    ("auto", OVERLAPS, 2, False)])
def test_where_their_order_is_forced_or_there_are_none_they_are_not(transport, overlaps, chunks, alone):
    check_overlap(Options(transport=transport), overlaps, chunks=chunks, alone=alone)


# ------------------------------------------------------------------ in time
@pytest.mark.parametrize("transport, checked", [("nccl", True), ("auto", False)])
def test_nccl_hears_of_its_launch_order_when_the_plugin_is_installed(monkeypatch, transport, checked):
    """Not when the pipeline connects: by then Megatron may have used NCCL, which reads its settings once."""
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    monkeypatch.setattr(cpu, "is_enabled", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with mock.patch.object(plugin, "uninstall", side_effect=InterruptedError):  # far enough
        with pytest.raises(ConfigurationError if checked else InterruptedError, match="NCCL_LAUNCH_ORDER_IMPLICIT=0" if checked else None):
            plugin.install(transport=transport)
