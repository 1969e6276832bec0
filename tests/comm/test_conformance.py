"""One suite for every transport: what `rrfp.comm.transport.Transport` promises."""

import random

import numpy as np
import pytest

from rrfp.action import Edge
from rrfp.comm.inbound import Inlet
from rrfp.comm.transport import Announcement, Arrival, Departure, Failure, Part, Transport
from rrfp.errors import ConfigurationError, PipelineError

PAIR = ({0: 0, 1: 1}, [(0, 1), (1, 0)])
EDGE, BACK = Edge(0, 1), Edge(1, 0)


@pytest.fixture(params=["scripted", "ipc", "tcp"])
def kind(request):
    return request.param


def test_one_lane_is_fifo(network, kind, part):
    net = network(kind, *PAIR, credits=3)
    net.begin()
    for microbatch in [4, 0, 3, 1, 2]:
        net[0].send(EDGE, microbatch, (part(100, microbatch),))
    arrivals = net.take(1, 5)
    assert [a.microbatch for a in arrivals] == [4, 0, 3, 1, 2]
    assert all((a.payload[0].data == a.microbatch).all() and a.edge == EDGE and a.lane == 0 for a in arrivals)


def test_lanes_overtake_each_other_but_not_themselves(network, kind, part):
    late = {0: 0.3}
    net = network(kind, *PAIR, credits=8, lanes=2, delays=lambda edge, microbatch: late.get(microbatch, 0.0))
    net.begin()
    for microbatch in range(6):
        net[0].send(EDGE, microbatch, (part(8),))
    assert [a.microbatch for a in net.take(1, 6)] == [1, 3, 5, 0, 2, 4]


def test_credits_bound_what_is_outstanding(network, kind, part):
    net = network(kind, *PAIR, credits=2)
    net.begin()
    for microbatch in range(5):
        net[0].send(EDGE, microbatch, (part(64),))
    held = net.take(1, 2, consume=False)
    net.settle(lambda: net[0].state()["edges"]["0>1"]["sent"] == 2)
    assert net.empty(1) and net[0].state()["edges"]["0>1"]["credits"] == 0
    assert net[0].state()["edges"]["0>1"]["waiting"] == 3
    net[1].release(held[0])  # giving memory back is not a credit
    assert net.empty(1)
    net[1].consumed(held[0])
    assert net.take(1, 1, consume=False)[0].microbatch == 2
    assert net.empty(1)


def test_edges_do_not_share_credits(network, kind, part):
    owner, edges = {0: 0, 1: 1, 2: 0, 3: 1}, [(0, 1), (2, 3), (1, 0), (3, 2), (1, 2), (2, 1)]
    net = network(kind, owner, edges, credits=1)
    net.begin()
    for edge in [Edge(0, 1), Edge(0, 1), Edge(2, 3), Edge(2, 1)]:
        net[0].send(edge, 0, (part(32),))
    assert sorted(a.edge for a in net.take(1, 3, consume=False)) == [(0, 1), (2, 1), (2, 3)]
    assert net.empty(1)


def test_a_buffer_is_the_receivers_until_release(network, kind, part):
    net = network(kind, *PAIR, credits=2)
    net.begin()
    kept = []
    for microbatch in range(20):
        net[0].send(EDGE, microbatch, (part(4096, microbatch),))
        arrival = net.get(1, Arrival)
        net[1].consumed(arrival)  # the credit is backed by another buffer
        kept.append(arrival)
    assert all((a.payload[0].data == a.microbatch).all() for a in kept)
    for arrival in kept:
        net[1].release(arrival)


def test_released_buffers_are_reused(network, kind, part):
    net = network(kind, *PAIR, credits=1)
    net.begin()
    seen = set()
    for microbatch in range(12):
        net[0].send(EDGE, microbatch, (part(4096),))
        arrival = net.get(1, Arrival)
        seen.add(arrival.payload[0].data.ctypes.data)
        net[1].release(arrival)
        net[1].consumed(arrival)
    if kind != "tcp":  # there the library allocates
        assert len(seen) <= 3


def test_twice_is_an_error(network, kind, part):
    net = network(kind, *PAIR)
    net.begin()
    net[0].send(EDGE, 0, (part(8),))
    arrival = net.take(1, 1)[0]
    with pytest.raises(PipelineError, match="edge 0>1 was consumed twice"):
        net[1].consumed(arrival)
    with pytest.raises(PipelineError, match="edge 0>1 was released twice"):
        net[1].release(arrival)


def test_the_next_calls_messages_wait(network, kind, part):
    net = network(kind, *PAIR, credits=8)
    net.begin(0)
    net[0].send(EDGE, 0, (part(8, 1),))
    net[0].begin(1)
    net[0].send(EDGE, 0, (part(8, 2),))
    net[0].send(EDGE, 1, (part(8, 3),))
    net[0].announce(EDGE, 2, 0.5)
    first = net.take(1, 1)[0]
    net.settle(lambda: net[1].state()["edges"]["0>1"]["received"] == 3)
    assert net.empty(1) and first.call == 0
    net[1].begin(1)
    net[0].send(EDGE, 2, (part(8, 4),))
    events = [net.get(1) for _ in range(4)]
    arrivals = [event for event in events if isinstance(event, Arrival)]
    assert [(a.call, a.microbatch, int(a.payload[0].data[0])) for a in arrivals] == [(1, 0, 2), (1, 1, 3), (1, 2, 4)]


def test_messages_before_the_first_call_wait(network, kind, part):
    net = network(kind, *PAIR)
    net[0].begin(7)
    net[0].send(EDGE, 0, (part(8),))
    net.settle(lambda: net[1].state()["edges"]["0>1"]["received"] == 1)
    assert net.empty(1)
    net[1].begin(7)
    assert net.take(1, 1)[0].call == 7


def test_calls_ahead_wait_for_their_turn(network, kind, part):
    """Evaluation with one microbatch per call: only credits hold the first stage back."""
    net = network(kind, *PAIR, credits=3)
    net.begin(0)
    for call in range(3):
        if call:
            net[0].begin(call)
        net[0].send(EDGE, 0, (part(8, call),))
    for call in range(3):
        if call:
            net[1].begin(call)
        arrival = net.get(1)
        assert (arrival.call, int(arrival.payload[0].data[0])) == (call, call)


def test_a_call_further_ahead_than_credits_is_a_failure(network, kind, part):
    net = network(kind, *PAIR, credits=2)
    net.begin(0)
    net[0].begin(3)
    net[0].send(EDGE, 0, (part(8),))
    failure = net.get(1)
    assert isinstance(failure, Failure) and failure.rank == 1 and failure.where == "0>1"
    assert "call 3 during call 0" in failure.text
    assert net.get(0) == failure


def test_an_old_call_is_a_failure(network, kind, part):
    net = network(kind, *PAIR)
    net.begin(0)
    net[1].begin(1)
    net[0].send(EDGE, 0, (part(8),))
    assert "call 0 during call 1" in net.get(1, Failure).text


def test_call_numbers_only_grow(network, kind):
    net = network(kind, *PAIR)
    net.begin(3)
    with pytest.raises(PipelineError, match="call 3 begins after call 3"):
        net[0].begin(3)


def test_send_before_begin_is_refused(network, kind, part):
    net = network(kind, *PAIR)
    with pytest.raises(PipelineError, match="before the first begin"):
        net[0].send(EDGE, 0, (part(8),))


def test_parts_of_every_sort(network, kind):
    rng = np.random.default_rng(5)
    payload = (
        Part("bfloat16", (3, 5), rng.integers(0, 256, 30).astype(np.uint8)),
        Part("float32", (2, 2), None),
        Part("float32", (), rng.integers(0, 256, 4).astype(np.uint8)),
        Part("int64", (0, 7), np.empty(0, np.uint8)),
        Part("bool", (1,), np.ones(1, np.uint8)),
        Part("float64", (9,), rng.integers(0, 256, 72).astype(np.uint8)),
    )
    net = network(kind, *PAIR)
    net.begin()
    net[0].send(EDGE, 0, payload)
    got = net.get(1, Arrival).payload
    assert [(p.dtype, p.shape, p.data is None) for p in got] == [(p.dtype, p.shape, p.data is None) for p in payload]
    for mine, theirs in zip(payload, got, strict=True):
        if mine.data is not None:
            assert np.array_equal(mine.data, theirs.data) and theirs.data.dtype == np.uint8
            if theirs.data.size:
                assert theirs.data.ctypes.data % 8 == 0


@pytest.mark.parametrize("payload", [(), (Part("float32", (4,), None),), (Part("uint8", (0,), np.empty(0, np.uint8)),)])
def test_a_payload_without_bytes(network, kind, payload):
    net = network(kind, *PAIR, credits=1)
    net.begin()
    for microbatch in range(3):
        net[0].send(EDGE, microbatch, payload)
    for arrival in net.take(1, 3):
        assert len(arrival.payload) == len(payload)
        assert all((mine.data is None) == (theirs.data is None) for mine, theirs in zip(payload, arrival.payload, strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        Part("float32", (3,), np.zeros(8, np.uint8)),
        Part("float7", (8,), np.zeros(8, np.uint8)),
        Part("float32", (2,), np.zeros(2, np.float32)),
        Part("uint8", (4,), np.zeros(8, np.uint8)[::2]),
    ],
)
def test_a_part_that_is_not_what_it_says_is_refused(network, kind, wrong):
    net = network(kind, *PAIR)
    net.begin()
    with pytest.raises(ValueError, match="bytes|dtype|contiguous"):
        net[0].send(EDGE, 0, (wrong,))


def test_sizes_and_counts_change_from_call_to_call(network, kind, seed):
    rng = random.Random(seed)
    net = network(kind, *PAIR, credits=3)
    for call in range(6):
        net.begin(call)
        count = rng.randint(1, 12)
        sizes = [rng.choice([0, 1, 63, 64, 65, 4097, rng.randint(1, 300_000)]) for _ in range(count)]
        for microbatch, size in enumerate(sizes):
            part = Part("uint8", (size,), np.full(size, microbatch + call, np.uint8))
            net[0].send(EDGE, microbatch, (part,) * rng.randint(1, 3))
            net[1].send(BACK, microbatch, (Part("uint8", (1,), np.full(1, microbatch, np.uint8)),))
        for arrival, size in zip(net.take(1, count), sizes, strict=True):
            assert arrival.call == call
            assert all(len(p.data) == size and (p.data == (arrival.microbatch + call) % 256).all() for p in arrival.payload)
        assert [int(a.payload[0].data[0]) for a in net.take(0, count)] == list(range(count))
        for rank in (0, 1):
            net[rank].flush(deadline=5.0)


def test_announcements(network, kind):
    net = network(kind, *PAIR)
    net.begin(4)
    net[0].announce(EDGE, 3, 0.25)
    event = net.get(1)
    assert isinstance(event, Announcement) and event[:3] == (4, EDGE, 3) and event.duration == 0.25


def test_abort_reaches_everybody_once(network, kind):
    owner = {stage: stage for stage in range(4)}
    net = network(kind, owner, [(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)])
    net.begin()
    failure = Failure(0, "0F3", "it broke", "Traceback: " + "x" * 100_000)
    net[0].abort(failure)
    net[0].abort(failure)
    for rank in (1, 2, 3):
        heard = net.get(rank)
        assert heard[:3] == failure[:3] and failure.traceback.endswith(heard.traceback) and not heard.lost
    net[3].abort(Failure(3, "later", "a second one"))
    assert all(net.empty(rank) for rank in range(4))


def test_goodbye_comes_after_everything_sent(network, kind, part):
    net = network(kind, *PAIR, credits=8, delays=lambda edge, microbatch: 0.05)
    net.begin()
    for microbatch in range(5):
        net[0].send(EDGE, microbatch, (part(1 << 20),))
    net[0].flush(deadline=5.0)
    net[0].close(deadline=5.0)
    assert [type(net.get(1)) for _ in range(6)] == [Arrival] * 5 + [Departure]


def test_flush_names_the_edge_that_is_stuck(network, kind, part):
    net = network(kind, *PAIR, credits=1)
    net.begin()
    net[0].send(EDGE, 0, (part(8),))
    net[0].flush(deadline=5.0)
    net[0].send(EDGE, 1, (part(8),))
    with pytest.raises(PipelineError, match="edge 0>1 has 1 waiting and 0 credits"):
        net[0].flush(deadline=0.05)


def test_closing_twice_and_aborting_after_is_harmless(network, kind):
    net = network(kind, *PAIR)
    net.begin()
    net.close()
    net.close()
    net[0].abort(Failure(0, "late", "nobody hears it"))


def test_state(network, kind, part):
    net = network(kind, *PAIR, credits=4)
    net.begin(2)
    net[0].send(EDGE, 0, (part(8),))
    net.take(1, 1, consume=False)
    net.settle(lambda: (edge := net[0].state()["edges"]["0>1"])["sent"] == 1 and edge["credits"] == 3)
    mine, theirs = net[0].state(), net[1].state()
    assert mine["call"] == 2 and mine["edges"]["0>1"]["direction"] == "out" and mine["edges"]["0>1"]["sent"] == 1
    assert theirs["edges"]["0>1"]["received"] == 1 and theirs["edges"]["0>1"]["waiting"] == 1
    assert 0 <= theirs["peers"][0] < 30


@pytest.mark.parametrize("options", [{"credits": 0}, {"lanes": 0}])
def test_no_credit_or_lane_is_refused(network, kind, options):
    with pytest.raises(ConfigurationError, match="at least one of each"):
        network(kind, *PAIR, **options)


def test_an_edge_inside_a_rank_is_refused(network, kind):
    with pytest.raises(ConfigurationError, match="edge 0>1"):
        network(kind, {0: 0, 1: 0, 2: 1}, [(0, 1), (1, 2)])


def test_every_transport_has_the_protocols_methods(network, kind):
    net = network(kind, *PAIR)
    assert all(callable(getattr(net[0], name)) for name in vars(Transport) if not name.startswith("_"))


def test_reusing_a_live_buffer_would_show(network, part, monkeypatch):
    """Negative control of `test_a_buffer_is_the_receivers_until_release`: a credit backed by the same buffer spoils what is kept."""

    def same_buffer(inlet, lease):
        inlet.granted[lease.buffer.slot] = lease.buffer
        return lease.buffer

    monkeypatch.setattr(Inlet, "consume", same_buffer)
    net = network("ipc", *PAIR, credits=1)
    net.begin()
    kept = []
    for microbatch in range(5):
        net[0].send(EDGE, microbatch, (part(4096, microbatch),))
        kept.append(net.get(1, Arrival))
        net[1].consumed(kept[-1])
    assert not all((a.payload[0].data == a.microbatch).all() for a in kept)
