"""Reading a run back: clocks of several hosts, killed ranks, leftovers, and what is refused."""

import json

import pytest

from rrfp.errors import ConfigurationError
from rrfp.trace.files import read


def edit_header(path, **changes):
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps(json.loads(first) | changes) + "\n" + rest)


def test_a_run_comes_back_whole(make):
    timeline = read(make(stages=4, microbatches=5, calls=(3, 4)).directory)
    assert timeline.rank_of == {0: 0, 1: 1, 2: 2, 3: 3}
    assert timeline.calls == (3, 4) and timeline.typical_call() == 4
    assert timeline.missing == () and timeline.notes == ()
    for call in timeline.of_call(4).values():
        assert len(call.actions) == 10 and call.complete and call.microbatches == 5
    assert len(timeline.breakdowns()) == 8
    assert read(make(name="again", stages=2, microbatches=3).directory, calls=[2]).calls == (2,)


def test_the_same_boot_shares_a_clock_whatever_the_wall_clocks_say(make):
    run = make(stages=2, microbatches=2)
    before = read(run.directory)
    edit_header(run.directory / "rank1.jsonl", wall=12345.0)
    assert read(run.directory).of_call(1)[1].begin == before.of_call(1)[1].begin


def test_another_host_is_aligned_through_wall_time(make):
    """As long as no messages say it better: they are taken out of the trace here."""
    run = make(stages=2, microbatches=2)
    for path in run.directory.glob("rank*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"arrival"' not in line))
    here = json.loads((run.directory / "rank0.jsonl").read_text().split("\n")[0])
    plain = read(run.directory).of_call(1)[1]
    # That host booted 1000 s earlier: its monotonic clock reads 1000 s more at the same moment.
    edit_header(run.directory / "rank1.jsonl", boot="another", monotonic=here["monotonic"] + 1000, wall=here["wall"])
    moved = read(run.directory).of_call(1)[1]
    for name in ("begin", "end"):
        assert getattr(moved, name) == pytest.approx(getattr(plain, name) - 1000, abs=1e-5)
    assert moved.actions[0].start == pytest.approx(plain.actions[0].start - 1000, abs=1e-5)
    assert moved.sent[0].time == pytest.approx(plain.sent[0].time - 1000, abs=1e-5)
    assert moved.waits[0].start == pytest.approx(plain.waits[0].start - 1000, abs=1e-5)


def test_every_cut_of_a_killed_ranks_file_is_survived(make, full):
    run = make(stages=2, microbatches=2, calls=(1,))
    path = run.directory / "rank1.jsonl"
    whole = path.read_bytes()
    for length in range(0, len(whole), 1 if full else 7):
        path.write_bytes(whole[:length])
        timeline = read(run.directory)
        if b"\n" not in whole[:length]:
            assert timeline.missing == (1,)
        elif not whole[:length].endswith(b"\n"):
            assert "rank1.jsonl ends in the middle of a line: rank 1 was killed while writing" in timeline.notes


def test_missing_ranks_are_named(make):
    run = make(stages=4, microbatches=2)
    (run.directory / "rank0.jsonl").unlink()
    (run.directory / "rank3.jsonl").unlink()
    timeline = read(run.directory)
    assert timeline.missing == (0, 3) and sorted(timeline.ranks) == [1, 2]


def test_a_lost_rank_leaves_an_unfinished_call(make):
    timeline = read(make(stages=3, microbatches=4, calls=(1, 2), lost=1).directory)
    assert timeline.notes == ("rank 1 did not finish call 2",)
    assert timeline.typical_call() == 1
    assert not timeline.of_call(2)[1].complete
    assert {(split.rank, split.call) for split in timeline.breakdowns()} == {(0, 1), (0, 2), (1, 1), (2, 1), (2, 2)}


def test_files_of_an_earlier_larger_run_are_left_out(make, tmp_path):
    make(stages=4, microbatches=2)
    run = make(stages=2, microbatches=2)
    timeline = read(run.directory)
    assert sorted(timeline.ranks) == [0, 1] and timeline.missing == ()
    assert any("rank3.jsonl is left over from an earlier run" in note for note in timeline.notes)


def test_what_is_not_a_trace_is_refused(make, tmp_path):
    with pytest.raises(ConfigurationError, match="holds no trace.*--rrfp-trace"):
        read(tmp_path / "nowhere")
    run = make(stages=2, microbatches=2)
    path = run.directory / "rank1.jsonl"
    whole = path.read_text()
    for text, message in (
        ('{"some": "json"}\n', "not a trace that this version reads"),
        ("no json\n" + whole, "is not a trace"),
        (whole.replace('"action", 1, "1F0"', '"action", 1, "F-zero"'), "'F-zero' is not an action"),
        (whole + '["surprise", 1]\n', "unknown event"),
        (whole + "[]\n", "is not a trace"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            read(run.directory)


def test_two_files_with_the_same_stage_are_refused(make):
    run = make(stages=2, microbatches=2)
    edit_header(run.directory / "rank1.jsonl", stages=[0])
    with pytest.raises(ConfigurationError, match="stage 0 is in both rank0.jsonl and rank1.jsonl: trace each pipeline"):
        read(run.directory)


def test_a_call_that_is_not_there_is_named(make):
    timeline = read(make(stages=2, microbatches=2, calls=(4, 5)).directory)
    with pytest.raises(ConfigurationError, match=r"call 9 is not in the trace: it holds calls 4\.\.5"):
        timeline.of_call(9)
    timeline = read(make(name="gaps", stages=2, microbatches=2, calls=(4, 7)).directory)
    with pytest.raises(ConfigurationError, match="call 5 is not in the trace: it holds calls 4, 7"):
        timeline.of_call(5)


def test_a_directory_of_traces_names_them(make, tmp_path):
    run = make(stages=2, microbatches=2)
    (tmp_path / "both").mkdir()
    for name in ("ready", "strict"):
        (tmp_path / "both" / name).mkdir()
        (tmp_path / "both" / name / "rank0.jsonl").write_bytes((run.directory / "rank0.jsonl").read_bytes())
    with pytest.raises(ConfigurationError, match="both holds no trace.*name one of the directories in it: ready, strict"):
        read(tmp_path / "both")
