"""The recorder: what it keeps, what it writes, and that it never ends the training."""

import json
import sys
import threading
from types import SimpleNamespace

import pytest

from rrfp.action import Action, Edge
from rrfp.trace.files import assemble, read
from rrfp.trace.recorder import Recorder


def record(recorder, call=1, now=0.0):
    recorder.begin_call(call, microbatches=1, forward_only=False, now=now)
    recorder.arrival(Edge(0, 1), 0, now + 0.5)
    recorder.waited("F", now, now + 1)
    recorder.start_action(Action("F", 1, 0))
    recorder.action(Action("F", 1, 0), now + 1, now + 3, 1, 0.25)
    recorder.sent(Edge(1, 2), 0, now + 3)
    recorder.end_call(now + 4)


def test_without_a_directory_only_the_last_call_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(rank=1, stages=[1], directory=None, debug=True)
    assert recorder.last_call is None
    for call in (1, 2, 3):
        record(recorder, call, 10.0 * call)
        assert recorder.last_call.call == call
        assert recorder.last_call.parts() == {"compute": 2 * 10**9, "F": 10**9, "B": 0, "agreement": 0, "runtime": 10**9}
        assert recorder.last_call.emulated == 25 * 10**7
        assert not recorder._events
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_holds_what_was_recorded_in_the_notation(tmp_path):
    recorder = Recorder(rank=1, stages=[1], directory=tmp_path / "deep" / "trace", ranks=3)
    record(recorder)
    recorder.close()
    header, *events = [json.loads(line) for line in (tmp_path / "deep/trace/rank1.jsonl").read_text().splitlines()]
    assert header["rrfp_trace"] == 1 and header["rank"] == 1 and header["stages"] == [1] and header["ranks"] == 3
    assert {"monotonic", "wall", "boot", "host", "pid"} <= set(header)
    assert events == [
        ["begin", 1, 1, False, 0.0],
        ["arrival", 1, "0>1", 0, 0.5],
        ["wait", 1, "F", 0.0, 1.0],
        ["action", 1, "1F0", 1.0, 3.0, 1, 0.25],
        ["sent", 1, "1>2", 0, 3.0],
        ["end", 1, 4.0],
    ]


@pytest.mark.parametrize("written", [True, False])
def test_a_call_can_be_kept_in_memory_whole(tmp_path, written):
    """The next one alone, as the file has it, with or without a file."""
    recorder = Recorder(rank=0, stages=[1], directory=tmp_path if written else None, ranks=1)
    record(recorder, 1)
    assert recorder.kept == []
    recorder.keep_next()
    record(recorder, 2, 10.0)
    record(recorder, 3, 20.0)
    header, *events = recorder.kept
    assert header["rrfp_trace"] == 1 and events[1] == ["arrival", 2, "0>1", 0, 10.5] and [event[1] for event in events] == [2] * 6
    timeline = assemble({0: recorder.kept})
    assert timeline.calls == (2,) and timeline.of_call(2)[0].complete
    if written:
        assert timeline.of_call(2) == read(tmp_path).of_call(2)
    assert not [event for event in recorder._events if event[0] == "arrival"]


def test_the_file_and_the_live_breakdown_agree(make):
    run = make(stages=3, microbatches=6)
    from_file = {(split.rank, split.call): split for split in read(run.directory).breakdowns()}
    for recorder in run.recorders:
        last = recorder.last_call
        assert from_file[last.rank, last.call] == last


def test_nothing_is_written_while_a_call_runs(tmp_path):
    recorder = Recorder(rank=0, stages=[0], directory=tmp_path)
    recorder.begin_call(1, microbatches=1, forward_only=False, now=0.0)
    before = [path.stat().st_size for path in tmp_path.iterdir()]
    for index in range(10_000):
        recorder.action(Action("F", 0, index), index, index + 1, 1)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == before


def test_a_new_run_replaces_the_old_file(tmp_path):
    for _ in range(2):
        record(Recorder(rank=0, stages=[1], directory=tmp_path), call=1)
    assert list(read(tmp_path).ranks[0].calls) == [1]


def test_closing_inside_a_failed_call_keeps_what_happened(tmp_path):
    recorder = Recorder(rank=0, stages=[0], directory=tmp_path)
    recorder.begin_call(7, microbatches=1, forward_only=True, now=1.0)
    recorder.action(Action("F", 0, 0), 1.0, 2.0, 1)
    recorder.close()
    recorder.close()
    timeline = read(tmp_path)
    call = timeline.ranks[0].calls[7]
    assert not call.complete and call.end == 2.0 and call.forward_only and len(call.actions) == 1
    assert timeline.notes == ("rank 0 did not finish call 7",)


def test_overlaps_in_debug_are_an_error_but_the_file_is_written(tmp_path):
    recorder = Recorder(rank=0, stages=[0], directory=tmp_path, debug=True)
    recorder.begin_call(1, microbatches=2, forward_only=False, now=0.0)
    recorder.action(Action("F", 0, 0), 0.0, 2.0, 1)
    recorder.action(Action("F", 0, 1), 1.0, 3.0, 2)
    with pytest.raises(ValueError, match="0F1 overlaps 0F0"):
        recorder.end_call(4.0)
    assert len(read(tmp_path).ranks[0].calls[1].actions) == 2


def test_a_full_disk_ends_the_trace_not_the_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    recorder = Recorder(rank=0, stages=[1], directory=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="the trace ends here: .*rank0.jsonl cannot be written"):
        recorder.begin_call(1, microbatches=1, forward_only=False, now=0.0)
        recorder.end_call(1.0)
    record(recorder, call=2)  # no second warning
    assert recorder.last_call.call == 2


def test_sends_from_another_thread_are_never_lost(tmp_path):
    recorder = Recorder(rank=0, stages=[0], directory=tmp_path)
    total, started = 20_000, threading.Event()

    def sender():
        for index in range(total):
            recorder.sent(Edge(0, 1), index, 0.0)
            started.set()

    recorder.begin_call(1, microbatches=1, forward_only=False, now=0.0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=sender)
    try:
        thread.start()
        assert started.wait(10)
        while thread.is_alive():
            recorder.flush()
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)
    recorder.flush()
    assert [message.microbatch for message in read(tmp_path).ranks[0].calls[1].sent] == list(range(total))


@pytest.fixture
def ranges(monkeypatch):
    """A stand-in for torch.cuda.nvtx that keeps the stack."""
    stack, log = [], []
    fake = SimpleNamespace(range_push=lambda text: (stack.append(text), log.append(text)), range_pop=lambda: stack.pop())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(nvtx=fake)))
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(nvtx=fake))
    return SimpleNamespace(stack=stack, log=log)


def test_nvtx_ranges_carry_the_notation_and_close(ranges):
    recorder = Recorder(rank=0, stages=[1], directory=None, nvtx=True)
    recorder.begin_call(1, microbatches=1, forward_only=False, now=0.0)
    recorder.start_action(Action("F", 1, 0))
    assert ranges.stack == ["1F0"]
    recorder.action(Action("F", 1, 0), 0.0, 1.0, 1)
    assert ranges.stack == []
    recorder.start_action(Action("B", 1, 0))  # it raises: `action` is never called
    recorder.close()
    assert ranges.stack == [] and ranges.log == ["1F0", "1B0"]


def test_an_action_that_is_launched_ahead_has_a_range_of_its_own(ranges):
    recorder = Recorder(rank=0, stages=[1], directory=None, nvtx=True)
    recorder.begin_call(0, microbatches=1, forward_only=False, now=0.0)
    for action in (Action("F", 1, 0), Action("F", 1, 1)):
        recorder.start_action(action)
        assert ranges.stack == [str(action)]
        recorder.launched()
        assert ranges.stack == []
    recorder.action(Action("F", 1, 0), 0.0, 1.0, 1)


def test_nvtx_is_off_unless_asked_for(ranges):
    record(Recorder(rank=0, stages=[1], directory=None))
    assert ranges.log == []

def test_the_mode_of_each_call_is_kept(tmp_path):
    recorder = Recorder(rank=0, stages=[0], directory=tmp_path, mode="ready:alt:2p")
    for number, mode in enumerate(["ready:alt:2p", "strict:1f1b:1f1b", None]):
        recorder.mode = mode
        recorder.begin_call(number, microbatches=1, forward_only=False, now=0.0)
        recorder.end_call(1.0)
    assert [call.mode for call in read(tmp_path).ranks[0].calls.values()] == ["ready:alt:2p", "strict:1f1b:1f1b", None]
