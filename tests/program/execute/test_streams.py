"""Streams by themselves: one operation after another, in the order of issue; a failure ends all that wait."""

import threading

import pytest
import torch

from rrfp.engine.failure import FailureLatch
from rrfp.errors import PipelineError
from rrfp.program.execute.streams import Streams


class Rig:
    def __init__(self, deadline=20.0):
        self.latch, self.ran, self.spans = FailureLatch(), [], []
        self.streams = Streams(rank=3, device=torch.device("cpu"), latch=self.latch, fail=self.latch.set, deadline=lambda: deadline,
                               record=lambda *span: self.spans.append(span))

    def issue(self, stream, name, **options):
        return self.streams.issue(stream, name, lambda: self.ran.append(name), **options)

    def close(self):
        self.streams.end()
        assert not self.streams.busy(deadline=20.0)


def test_a_stream_runs_in_the_order_of_issue_and_after_what_it_waits_for():
    rig, gate, arrived = Rig(), threading.Event(), []
    first = rig.streams.issue("slow", "first", gate.wait)
    operations = [rig.issue("fast", "second", after=[first]), rig.issue("fast", "third"), rig.issue("other", "free", then=lambda: arrived.append(1))]
    rig.streams.wait(operations[2])
    assert rig.ran == ["free"] and arrived == [1], "nothing of another stream holds it"
    gate.set()
    for operation in operations:
        rig.streams.wait(operation)
    assert rig.ran == ["free", "second", "third"]
    assert {(stream, name) for stream, name, *_ in rig.spans} == {("slow", "first"), ("fast", "second"), ("fast", "third"), ("other", "free")}
    rig.close()


def test_a_failure_is_told_and_ends_what_waits():
    rig, gate = Rig(), threading.Event()

    def break_() -> None:
        gate.wait()
        raise ValueError("on purpose")

    broken = rig.streams.issue("one", "broken", break_)
    behind, elsewhere = rig.issue("one", "behind"), rig.issue("two", "elsewhere", after=[broken])
    gate.set()
    for operation in (broken, behind, elsewhere):
        with pytest.raises(PipelineError, match=r"rank 3 failed \(broken\): ValueError: on purpose"):
            rig.streams.wait(operation)
    assert rig.ran == []
    rig.close()


def test_who_waits_too_long_says_for_what():
    rig, gate = Rig(deadline=0.2), threading.Event()
    operation = rig.streams.issue("one", "ALL_REDUCE:bucket0", gate.wait)
    with pytest.raises(PipelineError, match="ALL_REDUCE:bucket0 is not done after 0 s: another rank has not come to it"):
        rig.streams.wait(operation)
    gate.set()
    rig.close()
