"""The graph of a call: what every action came after, what it needed, and how long messages took by themselves."""

import pytest
from simulated import UNIT, change, late_edge, record, scenario, straggler

from rrfp.action import Edge, parse_action
from rrfp.report.steps import graph
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.trace.files import Timeline


def steps_of(timeline: Timeline) -> dict:
    return {str(step.action): step for step in graph(timeline, 0).steps}


def test_an_action_knows_its_predecessor_and_its_producer(timeline):
    steps = steps_of(timeline(scenario("uniform", stages=3, microbatches=4)))
    first, forward, backward, last = (steps[name] for name in ("0F0", "1F2", "1B0", "2B0"))
    assert (first.previous, first.inputs, first.ready) == (None, [], 0.0)
    assert str(forward.last_input.producer.action) == "0F2" and forward.last_input.edge == Edge(0, 1)
    assert str(backward.last_input.producer.action) == "2B0" and backward.last_input.edge == Edge(2, 1)
    # The last stage's backward needs its own forward: a hand-off, no message.
    assert str(last.last_input.producer.action) == "2F0" and last.last_input.edge is None
    assert str(backward.previous.action) == "1F1" and backward.free == backward.previous.end


def test_with_chunks_a_neighbour_on_the_same_rank_is_a_hand_off(timeline):
    steps = steps_of(timeline(scenario("uniform", stages=2, microbatches=2, chunks=2)))  # both stages on one rank
    assert str(steps["1F0"].last_input.producer.action) == "0F0" and steps["1F0"].last_input.edge is None
    assert str(steps["0B1"].last_input.producer.action) == "1B1"


def test_weight_gradients_follow_their_input_gradients(timeline):
    steps = steps_of(timeline(scenario("uniform", stages=3, microbatches=4), "ready:fill-r:2p-1"))
    assert str(steps["1W2"].last_input.producer.action) == "1I2"
    assert str(steps["1I2"].last_input.producer.action) == "2I2"


def test_latency_is_what_an_edge_takes(timeline):
    latencies = graph(timeline(late_edge("1>2", stages=4, microbatches=8)), 0).latencies
    assert {edge: pytest.approx(2 * UNIT if str(edge) == "1>2" else 0.001) for edge in latencies} == {
        edge: messages[0].latency for edge, messages in latencies.items()}


def test_a_message_without_a_credit_is_not_under_way(timeline):
    # Stage 1 takes its activations late, so those of stage 0 wait for credits and then, consumed at last, come at once.
    slow = straggler(1, factor=4.0, stages=2, microbatches=12)
    g = graph(timeline(slow, "ready:f-first:2p"), 0)
    assert max(message.latency for message in g.latencies[Edge(0, 1)]) <= 1e-9


def test_in_a_rendezvous_a_message_waits_for_its_receiver(timeline, tmp_path):
    costs = scenario("uniform", stages=4, microbatches=8)
    result = simulate_megatron_1f1b(costs, message_cost=0.001)
    g = graph(record(tmp_path / "meets", costs, simulated=result, meets=True), 0)
    assert g.mode == "megatron-1f1b"
    longest = max(message.arrived - message.sent for messages in g.latencies.values() for message in messages)
    assert longest > 0.9 * UNIT
    assert max(message.latency for messages in g.latencies.values() for message in messages) < 0.01


def test_spans_that_overlap_are_clipped(timeline):
    made = timeline(scenario("uniform", stages=2, microbatches=2))
    actions = made.ranks[0].calls[0].actions
    actions[1] = actions[1]._replace(start=actions[0].start)
    first, second = graph(made, 0).rows[0][:2]
    assert second.start == first.end <= second.end


def test_what_a_lost_rank_has_not_written_is_missing_not_wrong(timeline):
    made = timeline(scenario("uniform", stages=4, microbatches=8), lost=2)
    g = graph(made, 0)
    assert g.lost == {2}
    steps = {step.action: step for step in g.steps}
    # 3F7 ran in the simulation with an input that nobody has told of sending.
    orphan = steps[parse_action("3F7")]
    assert orphan.last_input.producer is None and orphan.last_input.latency == 0
    assert all(message.producer is not None for messages in g.latencies.values() for message in messages)


def test_costs_changed_on_purpose_are_seen(timeline):
    # The negative control of these helpers: without the change there is nothing to see.
    plain = scenario("uniform", stages=4, microbatches=8)
    late = change(plain, delays=lambda kind, stage, microbatch: 0.005 if stage == 2 else 0.0)
    assert max(m.latency for m in graph(timeline(plain), 0).latencies[Edge(1, 2)]) == pytest.approx(0.0, abs=1e-9)
    assert min(m.latency for m in graph(timeline(late), 0).latencies[Edge(1, 2)]) == pytest.approx(0.005)
