"""The Chrome trace obeys the format's rules and says what happened."""

import json
from collections import Counter, defaultdict

import pytest

from rrfp.trace.chrome import arrows, chrome_events, write_chrome
from rrfp.trace.files import read


def check(events):
    """The rules of the Trace Event Format that viewers rely on. Raises AssertionError."""
    flows, slices = defaultdict(list), defaultdict(list)
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0, event
        assert event["ph"] in "XMCsf", event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values()), event
        if event["ph"] in "sf":
            flows[event["cat"], event["name"], event["id"]].append(event)
    for name, pair in flows.items():
        assert [event["ph"] for event in pair] == ["s", "f"], f"flow {name} does not pair up"
        assert pair[1]["bp"] == "e"
        for event in pair:
            # An end point outside every slice is silently dropped by viewers.
            assert any(a <= event["ts"] <= b for a, b in slices[event["pid"], event["tid"]]), f"flow {name} hangs in the air"
    for track, spans in slices.items():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_until = []
        for start, end in spans:
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, f"slices of {track} cross"
            open_until.append(end)
    return flows


@pytest.mark.parametrize("options", [{}, {"ready": True}, {"split": True}, {"emulated": False}], ids=str)
def test_the_format_and_every_arrow(make, options):
    stages, microbatches = 4, 6
    timeline = read(make(stages=stages, microbatches=microbatches, **options).directory)
    events = chrome_events(timeline)
    flows = check(events)
    # Per call: one forward and one backward message per microbatch and link.
    assert len(flows) == 2 * 2 * (stages - 1) * microbatches
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    assert names["2F0"] == names["0F5"] == 2 and names["call 1"] == stages
    tracks = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert "stage 2 (rank 2)" in tracks and "rank 3" in tracks
    emulated = [event for event in events if "emulated ms" in event.get("args", {})]
    assert bool(emulated) == options.get("emulated", True)


def test_times_are_microseconds_from_the_first_begin(make):
    timeline = read(make(stages=2, microbatches=2).directory)
    zero = min(call.begin for call in timeline.of_call(1).values())
    first = timeline.of_call(1)[0].actions[0]
    event = next(event for event in chrome_events(timeline) if event["name"] == str(first.action))
    assert event["ts"] == pytest.approx((first.start - zero) * 1e6, abs=1e-3)
    assert event["dur"] == pytest.approx((first.end - first.start) * 1e6, abs=2e-3)


@pytest.mark.parametrize("split", [False, True])
def test_arrows_go_from_the_producer_to_the_consumer(make, split):
    timeline = read(make(stages=3, microbatches=4, split=split).directory)
    back = "I" if split else "B"
    pairs = {(str(a.action), str(b.action)) for a, b, _ in arrows(timeline.of_call(1).values())}
    forward = {(f"{s}F{m}", f"{s + 1}F{m}") for s in (0, 1) for m in range(4)}
    backward = {(f"{s}{back}{m}", f"{s - 1}{back}{m}") for s in (1, 2) for m in range(4)}
    assert pairs == forward | backward


def test_counters_follow_what_was_in_flight(make):
    timeline = read(make(stages=3, microbatches=4, calls=(1,)).directory)
    counts = defaultdict(list)
    for event in chrome_events(timeline):
        if event["ph"] == "C":
            counts[event["name"]].append((event["ts"], event["args"]["in flight"]))
    peaks = {name: max(value for _, value in series) for name, series in counts.items()}
    assert peaks == {"stage 0": 3, "stage 1": 2, "stage 2": 1}
    assert all(max(series)[1] == 0 for series in counts.values())


def test_the_file_is_json_and_may_hold_one_call(make, tmp_path):
    timeline = read(make(stages=2, microbatches=3).directory)
    write_chrome(timeline, tmp_path / "all.json")
    write_chrome(timeline, tmp_path / "one.json", calls=[2])
    everything, one = (json.loads((tmp_path / name).read_text()) for name in ("all.json", "one.json"))
    assert everything["displayTimeUnit"] == "ms" and everything["traceEvents"] == chrome_events(timeline)
    check(one["traceEvents"])
    assert {event["name"] for event in one["traceEvents"] if event.get("cat") == "call"} == {"call 2"}


def test_a_lost_rank_is_still_exported(make):
    timeline = read(make(stages=3, microbatches=4, lost=1).directory)
    check(chrome_events(timeline))


BREAKAGES = {
    "an arrow without its head": lambda events: events.remove(next(e for e in events if e["ph"] == "f")),
    "an arrow into nothing": lambda events: next(e for e in events if e["ph"] == "f").update(ts=10**9),
    "a negative duration": lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1),
    "no track": lambda events: events[-1].pop("tid"),
    "crossing slices": lambda events: next(e for e in events if e["name"] == "0F0").update(dur=30_000),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_the_check_notices(make, name):
    events = chrome_events(read(make(stages=2, microbatches=3).directory))
    BREAKAGES[name](events)
    with pytest.raises(AssertionError):
        check(events)
