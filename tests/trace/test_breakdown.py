"""The breakdown: its parts sum to the whole exactly, whatever is recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.action import Action
from rrfp.trace.breakdown import Breakdown, break_down, combine, summarise, table, tenths

CALL = dict(rank=0, call=1)
SECONDS = st.floats(-10, 1e6, allow_nan=False)


@given(
    begin=SECONDS,
    length=st.floats(0, 100),
    actions=st.lists(st.tuples(SECONDS, st.floats(0, 10), st.floats(0, 20), st.sampled_from("FBW")), max_size=20),
    waits=st.lists(st.tuples(SECONDS, st.floats(0, 10), st.sampled_from(["F", "B", "agreement", "send", "other"])), max_size=20),
)
def test_parts_sum_to_the_whole_whatever_overlaps(begin, length, actions, waits):
    end = begin + length
    # Half of the spans near the call, so that clipping, nesting and overlap all occur.
    place = lambda at: begin + at % max(length, 1e-3) if at > 5e5 else at  # noqa: E731
    split = break_down(
        [(Action(kind, 0, i), place(at), place(at) + long, 1, pad) for i, (at, long, pad, kind) in enumerate(actions)],
        [(cause, place(at), place(at) + long) for at, long, cause in waits],
        begin,
        end,
        **CALL,
    )
    assert sum(split.parts().values()) == split.total == split.compute + sum(split.blocked.values()) + split.runtime
    assert all(part >= 0 for part in split.parts().values())
    assert 0 <= split.emulated <= split.compute
    assert sum(split.counts.values()) == len(actions)
    assert sum(tenths(split.parts()).values()) == (1000 if split.total else 0)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=30), st.integers(0, 2**30))
def test_adjacent_spans_are_never_an_overlap(lengths, origin):
    # Nanosecond rounding must not turn spans that touch into spans that overlap.
    at, actions, waits = origin / 7, [], []
    begin = at
    for index, length in enumerate(lengths):
        end = at + length / 3e6
        actions.append((Action("F", 0, index), at, end, 1, 0.0)) if index % 2 else waits.append(("F", at, end))
        at = end
    assert break_down(actions, waits, begin, at, debug=True, **CALL).overlaps == 0


def test_what_goes_where():
    split = break_down(
        [(Action("F", 0, 0), 1.0, 3.0, 1, 0.5), (Action("B", 0, 0), 6.0, 7.0, 2, 0.0)],
        [("B", 3.0, 5.5), ("agreement", 5.5, 6.0)],
        0.5,
        8.0,
        **CALL,
    )
    assert split.parts() == {"compute": 3 * 10**9, "F": 0, "B": 25 * 10**8, "agreement": 5 * 10**8, "runtime": 15 * 10**8}
    assert split.emulated == 5 * 10**8
    assert split.counts == {"F": 1, "B": 1}
    assert split.peak_in_flight == {0: 2}
    assert split.overlaps == 0


OVERLAPS = {
    "two actions": ([(Action("F", 0, 0), 1, 3, 1, 0.0), (Action("F", 0, 1), 2, 4, 1, 0.0)], [], "0F1 overlaps 0F0"),
    "two waits": ([], [("F", 1, 3), ("B", 2, 4)], "B overlaps F"),
    "a wait and an action": ([(Action("F", 0, 0), 1, 3, 1, 0.0)], [("B", 2, 4)], "the wait for B overlaps 0F0"),
    "the end of the call": ([(Action("F", 0, 0), 1, 11, 1, 0.0)], [], "0F0 overlaps the edge of the call"),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlaps_are_refused_in_debug_and_counted_otherwise(name):
    actions, waits, message = OVERLAPS[name]
    with pytest.raises(ValueError, match=message):
        break_down(actions, waits, 0, 10, debug=True, **CALL)
    split = break_down(actions, waits, 0, 10, **CALL)
    assert split.overlaps == 1
    assert sum(split.parts().values()) == split.total


def test_compute_wins_over_a_wait():
    # Executors that complete later than they launch: the host waits while the device computes.
    split = break_down([(Action("F", 0, 0), 2, 8, 1, 0.0)], [("B", 0, 10)], 0, 10, **CALL)
    assert (split.compute, split.blocked["B"], split.runtime) == (6 * 10**9, 4 * 10**9, 0)


def split_of(rank, call, compute, total, forward_only=False):
    return Breakdown(
        rank=rank, call=call, total=total, compute=compute, emulated=0, blocked={"F": total - compute}, runtime=0,
        counts={"F": 2}, peak_in_flight={rank: rank + call}, forward_only=forward_only,
    )  # fmt: skip


def test_summary_drops_the_first_call_and_evaluation():
    splits = [split_of(rank, call, 10 * call + rank, 100) for rank in (0, 1) for call in (1, 2, 3)]
    summary = summarise(splits + [split_of(0, 4, 99, 100, forward_only=True)])
    assert summary.calls == 2
    assert summary.ranks[0].compute == 20 + 30
    assert summary.ranks[1].peak_in_flight == {1: 4}
    assert summary.mean.compute == 20 + 30 + 21 + 31 and summary.mean.total == 400
    assert summary.worst.rank == 0
    # A single call is kept, and evaluation where there is nothing else.
    assert summarise([split_of(0, 1, 5, 10)]).calls == 1
    assert summarise([split_of(0, 1, 5, 10, forward_only=True)]).ranks[0].compute == 5
    with pytest.raises(ValueError, match="no complete call"):
        summarise([])


def test_combine_keeps_the_sum():
    total = combine([split_of(0, call, call, 100) for call in (1, 2, 3)])
    assert sum(total.parts().values()) == total.total == 300


def test_table_rows_sum_to_100():
    lines = table(summarise([split_of(rank, 1, 1, 3) for rank in (0, 1, 2)])).splitlines()
    head, rows = lines[0], lines[1:6]
    assert head.split()[:3] == ["rank", "s/call", "compute"] and "emulated" not in head
    for row in rows:
        cells = row.replace("worst: ", "worst:").split()
        assert round(sum(float(cell) for cell in cells[2:6]), 6) == 100.0, row
    assert rows[3].split()[0] == "mean" and rows[4].split()[:2] == ["worst:", "0"]
