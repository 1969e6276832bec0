"""Clocks of several hosts, set by the messages between them: recovered within the error, and no message arrives before it was sent."""

import json
import random
from itertools import pairwise

import pytest

from rrfp.trace.clocks import Clock, Crossing, align, describe
from rrfp.trace.files import read


class Wrong:
    """A host's clock: what it shows at a true time."""

    def __init__(self, offset=0.0, rate=0.0):
        self.offset, self.rate = offset, rate

    def __call__(self, time):
        return time + self.offset + self.rate * (time - 100.0)


def traffic(clocks, *, calls, messages, seconds, rng, least=50e-6, pairs=None):
    """Messages between neighbours both ways, each host's times by its own clock. Latencies: `least` and more, seldom very much more."""
    hosts = list(clocks)
    for call in range(calls):
        for _ in range(messages):
            for pair in pairs or pairwise(hosts):
                for source, destination in (pair, pair[::-1]):
                    sent = 100.0 + (call + rng.random()) * seconds
                    arrived = sent + least * rng.uniform(1, 3) + (0.01 if rng.random() < 0.1 else 0.0)
                    yield Crossing(call, source, destination, clocks[source](sent), clocks[destination](arrived))


def worst(clocks, aligned, *, calls, seconds) -> float:
    """The largest error left, in units of the error that was stated."""
    ratio = 0.0
    first = next(iter(clocks))
    for host, shows in clocks.items():
        for call in range(calls):
            for part in (0.02, 0.5, 0.98):
                true = 100.0 + (call + part) * seconds
                left = shows(true) + aligned[host].offset(call, shows(true)) - clocks[first](true)
                if host != first:
                    ratio = max(ratio, abs(left) / aligned[host].error)
    return ratio


@pytest.mark.parametrize("hosts", [2, 5])
@pytest.mark.parametrize("drift", [0.0, 5e-5], ids=["steady", "drifting"])
@pytest.mark.parametrize("calls, seconds", [(1, 2.0), (6, 2.0), (20, 30.0)], ids=["one-call", "short", "ten-minutes"])
def test_offsets_and_drift_are_recovered_within_the_error(hosts, drift, calls, seconds, seed, full):
    rng = random.Random(seed)
    for _ in range(50 if full else 10):
        clocks = {"h0": Wrong()} | {f"h{i}": Wrong(rng.uniform(-9e3, 9e3), rng.uniform(-drift, drift)) for i in range(1, hosts)}
        aligned = align(traffic(clocks, calls=calls, messages=40, seconds=seconds, rng=rng), clocks)
        assert worst(clocks, aligned, calls=calls, seconds=seconds) <= 1.0
        # The quickest messages take 50 us or a little more: hop by hop the error is about that, plus what a call may have drifted.
        hops = hosts - 1
        assert all(aligned[f"h{i}"].error < hops * 1e-3 for i in range(1, hosts))
        if calls > 1:
            assert aligned["h1"].error < 3e-4


def test_a_constant_alone_does_not_fit_a_drifting_clock(seed):
    """Negative control: with its rate ignored, a drifting clock is off by more than the error."""
    rng = random.Random(seed)
    clocks = {"a": Wrong(), "b": Wrong(0.01, 5e-5)}
    aligned = align(traffic(clocks, calls=10, messages=50, seconds=30.0, rng=rng), clocks)
    assert aligned["b"].rate == pytest.approx(-5e-5, abs=2e-6)
    assert worst(clocks, aligned, calls=10, seconds=30.0) <= 1.0
    aligned["b"].rate = 0.0
    assert worst(clocks, aligned, calls=10, seconds=30.0) > 1.0


def test_the_error_is_half_a_round_trip():
    one_way, back = Crossing(0, "a", "b", 10.0, 110.0 + 0.003), Crossing(0, "b", "a", 111.0, 11.0 + 0.001)
    clock = align([one_way, back], ["a", "b"])["b"].summary()
    assert clock.offset == pytest.approx(-100.001) and clock.error == pytest.approx(0.002, abs=1.1e-4)  # it may drift between the two
    # A slower message more changes nothing, a quicker one narrows it.
    slow, quick = Crossing(0, "a", "b", 10.5, 110.9), Crossing(0, "a", "b", 10.5, 110.5 + 0.001)
    assert align([one_way, back, slow], ["a", "b"])["b"].summary().offset == pytest.approx(-100.001)
    assert align([one_way, back, quick], ["a", "b"])["b"].summary() == pytest.approx((-100.0, 0.001), abs=1.1e-4)


def test_a_chain_of_hosts_in_any_order_of_ranks(seed):
    """Hosts that exchange nothing directly are related through those between them."""
    clocks = {"a": Wrong(), "b": Wrong(0.3), "c": Wrong(-0.2), "d": Wrong(0.1)}
    pairs = [("a", "d"), ("d", "b"), ("b", "c")]
    aligned = align(traffic(clocks, calls=3, messages=20, seconds=1.0, rng=random.Random(seed), pairs=pairs), clocks)
    assert worst(clocks, aligned, calls=3, seconds=1.0) <= 1.0
    assert aligned["d"].error < aligned["b"].error < aligned["c"].error


def test_without_messages_both_ways_nothing_is_claimed():
    one_way = [Crossing(0, "a", "b", 10.0, 9.0)]
    for crossings in ([], one_way):
        aligned = align(crossings, ["a", "b"])
        assert aligned["b"].summary() == Clock(0.0, None) and aligned["a"].summary() == Clock(0.0, 0.0)
    assert "by its time of day only" in describe("b", Clock(0.0, None))
    assert describe("b", Clock(-0.0123, 0.00004)) == \
        "the clock of b is aligned by its messages, to within 40 us (its time of day was corrected by -12.300 ms)"


def test_a_call_without_messages_takes_the_nearest_ones():
    both = [Crossing(4, "a", "b", 10.0, 10.5), Crossing(4, "b", "a", 11.4, 11.0)]
    aligned = align(both, ["a", "b"])["b"]
    assert aligned.offset(9, 11.4) == aligned.offset(4, 11.4) == pytest.approx(-0.45)


# ---------------------------------------------------------------------- whole traces
def put_on(path, clock, *, host):
    """Rewrites a rank's file as if its host had that clock, and were another one with the same time of day at the start."""
    header, *lines = map(json.loads, path.read_text().splitlines())
    header |= {"boot": host, "host": host}
    for line in lines:
        places = {"begin": [4], "action": [3, 4], "wait": [3, 4], "arrival": [4], "sent": [4], "end": [2]}[line[0]]
        for place in places:
            line[place] = clock(line[place])
    path.write_text("".join(json.dumps(value) + "\n" for value in [header, *lines]))


def backwards(timeline) -> int:
    """Messages that arrived before they were sent."""
    calls = [(number, call) for trace in timeline.ranks.values() for number, call in trace.calls.items()]
    sent = {(number, message.edge, message.microbatch): message.time for number, call in calls for message in call.sent}
    pairs = [(sent[number, m.edge, m.microbatch], m.time) for number, call in calls for m in call.arrivals]
    assert pairs
    return sum(arrived < left for left, arrived in pairs)


def test_a_trace_of_three_hosts(make, monkeypatch):
    run = make(stages=4, microbatches=6, calls=(1, 2, 3))
    plain = read(run.directory)
    assert plain.clocks == {} and plain.notes == () and backwards(plain) == 0
    for rank, clock, host in ((1, Wrong(0.4, 3e-5), "east"), (2, Wrong(0.4, 3e-5), "east"), (3, Wrong(-0.2), "west")):
        put_on(run.directory / f"rank{rank}.jsonl", clock, host=host)
    timeline = read(run.directory)
    assert backwards(timeline) == 0
    here, east, west = timeline.clocks
    assert (east, west) == ("east", "west") and timeline.clocks[here] == (0.0, 0.0)
    for rank, host in enumerate([here, "east", "east", "west"]):
        for number in (1, 2, 3):
            for ours, true in zip(timeline.of_call(number)[rank].actions, plain.of_call(number)[rank].actions, strict=True):
                assert ours.action == true.action
                assert ours.start == pytest.approx(true.start, abs=timeline.clocks[host].error + 1e-9)
                assert ours.end - ours.start == pytest.approx(true.end - true.start, rel=2e-4)
            for name in ("waits", "arrivals", "sent"):
                assert len(getattr(timeline.of_call(number)[rank], name)) == len(getattr(plain.of_call(number)[rank], name))
    assert [note.partition(" is ")[0] for note in timeline.notes] == ["the clock of east", "the clock of west"]
    assert timeline.clocks["east"].error < 0.0011 and timeline.clocks["west"].error < 0.0022  # messages take 1 ms in these traces

    monkeypatch.setattr("rrfp.trace.files.align", lambda crossings, hosts: align([], hosts))
    assert backwards(read(run.directory)) > 0, "negative control: by the time of day alone, messages arrive before they were sent"


def test_hosts_of_the_same_name_and_unknown_boots_are_told_apart(make):
    run = make(stages=3, microbatches=3)
    for rank, offset in ((1, 0.1), (2, 0.2)):
        put_on(run.directory / f"rank{rank}.jsonl", Wrong(offset), host=f"boot{rank}")
    for rank in (0, 1, 2):
        path = run.directory / f"rank{rank}.jsonl"
        header, rest = path.read_text().split("\n", 1)
        path.write_text(json.dumps(json.loads(header) | {"host": "node", "boot": ""}) + "\n" + rest)
    timeline = read(run.directory)
    assert list(timeline.clocks) == ["node (rank 0)", "node (rank 1)", "node (rank 2)"]
    assert backwards(timeline) == 0
