"""Engines, transports and executor together on fake GPUs, under random schedules; and what breaks them."""

import threading

import pytest
from fake_cuda import FakeDevice
from fake_nccl import FakeNccl
from pipelines import Case, Run
from rig import PATHS

from rrfp.action import Edge
from rrfp.comm.cuda_ipc import DeviceBuffer, DeviceMappings
from rrfp.comm.nccl_transport import NcclTransport
from rrfp.engine.launches import Launches
from rrfp.engine.loop import Engine
from rrfp.errors import PipelineError
from rrfp.policy import Policy


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


def test_random_schedules(path, tmp_path, seed, full):
    for index in range(60 if full else 4):
        Run(Case.draw(path, seed + index), tmp_path / str(index)).check()


@pytest.mark.parametrize("connections", [1, 8])
def test_domains_of_two(path, tmp_path, seed, full, connections):
    """Collectives inside actions, with transfers between them: each device runs one operation at a time."""
    for index in range(20 if full else 2):
        Run(Case.draw(path, seed + index, members=2, ranks=2, connections=connections), tmp_path / str(index)).check()


def test_reductions_of_replicas_between_transfers(tmp_path, seed, full):
    """Nobody agrees on their places among the transfers. With one chunk per rank the order is forced: a stage reduces in its last backward,
    which comes after those of the stages behind it. Each device runs one operation at a time."""
    for index in range(40 if full else 3):
        drawn = Case.draw("nccl", seed + index, members=2, replicas=True, calls=(False, False))
        Run(drawn, tmp_path / str(index)).check()


# ------------------------------------------------------------------ negative controls
def broken(path, tmp_path, *, tries=12, **options) -> str:
    """What the first run of some says that does not go well."""
    for seed in range(tries):
        case = Case(path, seed, wait=2.0, **{"policy": Policy(limit="2p"), **options})
        try:
            Run(case, tmp_path / str(seed)).check()
        except (PipelineError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing went wrong")


def test_a_buffer_reused_before_its_event(path, tmp_path, monkeypatch):
    monkeypatch.setattr(DeviceBuffer, "busy", False)
    assert "read" in broken(path, tmp_path, run_ahead=2, credits=1, pace=1e-3)


def test_an_action_that_counts_as_done_when_it_is_launched(path, tmp_path, monkeypatch):
    """What is sent has not been computed."""
    def finish(self, running, outputs, done, *, lengthen=0.0):
        done(outputs)

    monkeypatch.setattr(Launches, "finish", finish)
    assert "read" in broken(path, tmp_path, pace=1e-3)


def test_a_header_before_its_bytes(tmp_path, monkeypatch):
    write = DeviceMappings.write

    def hasty(self, grant, starts, arrays):
        with monkeypatch.context() as patch:
            patch.setattr(self._device, "synchronize", lambda event: None)
            write(self, grant, starts, arrays)

    monkeypatch.setattr(DeviceMappings, "write", hasty)
    assert "read" in broken("ipc", tmp_path)


def test_a_copy_that_is_sent_on_before_it_is_down(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeDevice, "synchronize", _only_completions(FakeDevice.synchronize))
    assert "read" in broken("host", tmp_path)


def _only_completions(synchronize):
    def hasty(self, event):
        if threading.current_thread().name == "rrfp-completions":
            synchronize(self, event)

    return hasty


def test_receives_that_are_posted_before_the_other_end_is_known_to_come(tmp_path, monkeypatch):
    """As soon as READY is here, without a time that both ends agree on: on devices that run one operation at a time that is a cycle."""
    hear = NcclTransport._hear_ready

    def eager(self, ready):
        hear(self, ready)
        with self._lock:
            for one in self._order:
                one.final = True

    monkeypatch.setattr(NcclTransport, "_hear_ready", eager)
    said = broken("nccl", tmp_path, microbatches=7)
    assert "for ever" in said or "KeyError" in said, said


def test_members_that_order_transfers_by_themselves(tmp_path, monkeypatch):
    """Of two members of each stage one prefers transfers, the other actions, whose collectives they share: what one device posts first
    waits for what the other posts last. `Issuer` puts transfers into the agreed sequence."""
    def alone(self):
        prefers_actions = self._agreement.leads == (self.rank == 0)
        if prefers_actions and len(self._launched) < self._executor.capacity and self.scheduler.admissible():
            return False
        due = self._issuer.due()
        return due is not None and self._issuer.issue(due)

    monkeypatch.setattr(Engine, "_issue", alone)
    said = broken("nccl", tmp_path, members=2, ranks=2, microbatches=7, run_ahead=2, agreed=False)
    assert "for ever" in said, said


def test_reductions_of_replicas_at_any_place(tmp_path):
    """Why several chunks per rank, whose reductions Megatron moves to later actions, are refused beside transfers by NCCL."""
    assert "for ever" in broken("nccl", tmp_path, members=2, ranks=2, replicas=True, forced=False, calls=(False,))


def test_communicators_that_are_made_at_first_use(tmp_path, monkeypatch):
    connect = FakeNccl.connect
    monkeypatch.setattr(FakeNccl, "connect", lambda self, name, ranks: None if isinstance(name, Edge) else connect(self, name, ranks))
    assert "before rank" in broken("nccl", tmp_path)


def test_communicators_that_are_made_in_another_order(tmp_path, monkeypatch):
    open_ = NcclTransport.open

    def reversed_on_odd_ranks(self, post, *, deadline):
        self._connect = self._connect[:: -1 if self._rank % 2 else 1]
        open_(self, post, deadline=deadline)

    monkeypatch.setattr(NcclTransport, "open", reversed_on_odd_ranks)
    assert "connects" in broken("nccl", tmp_path)
