"""The virtual clock of streams: what overlaps with what, where reductions go, what ZeRO-3 holds."""

from dataclasses import replace

import pytest

from rrfp.program.builders import dualpipev, interleaved, one_f_one_b
from rrfp.program.clock import nominal, overlap, paired, run
from rrfp.program.dag import ALL_REDUCE, ALL_TO_ALL, COMPUTE
from rrfp.program.directives import Place, Replicate, Shard, Split, apply
from rrfp.program.traced import sketch
from rrfp.program.training import training_dag

PARTS = ("attention", "experts", "combine")


def experts(builder, stages, ranks, microbatches, **options):
    return apply(training_dag(sketch(stages, parts=PARTS, batch=2 * microbatches)), builder(ranks, microbatches, replicas=2, experts=True, **options))


def test_no_edge_and_no_stream_is_violated():
    dag = experts(dualpipev, 4, 2, 6)
    spans = run(dag).spans
    assert set(spans) == set(dag.nodes)
    assert all(spans[edge.source].end <= spans[edge.destination].start for edge in dag.edges)
    streams = {}
    for name, span in spans.items():
        streams.setdefault((dag.nodes[name].devices, dag.nodes[name].stream), []).append(span)
    for found in streams.values():
        found.sort()
        assert all(before.end <= after.start for before, after in zip(found, found[1:]))


def test_the_closed_form_of_1f1b():
    dag = apply(training_dag(sketch(4, batch=16)), one_f_one_b(4, 16))
    free = run(dag, lambda node: nominal(node) if node.kind == COMPUTE else 0.0)
    assert free.makespan == pytest.approx(3 * (16 + 4 - 1))


@pytest.mark.parametrize("exchange", [0.5, 1.0])
def test_a_pairs_exchanges_lie_under_the_others_computation(exchange):
    """DualPipeV's pairs hide at least 80% of their all-to-alls; the same order without pairs, under 10%."""
    def duration(node):
        return exchange if node.kind == ALL_TO_ALL else nominal(node)

    together, apart = experts(dualpipev, 4, 2, 10), experts(dualpipev, 4, 2, 10, overlap=False)
    names = paired(together)
    assert len(names) > 0.5 * len(together.of(ALL_TO_ALL)) and not paired(apart)
    runs = {"pairs": run(together, duration), "apart": run(apart, duration)}
    shares = {"pairs": overlap(together, runs["pairs"].spans, names), "apart": overlap(apart, runs["apart"].spans, names),
              "pairs, all of the call": overlap(together, runs["pairs"].spans)}  # fmt: skip
    print(shares, {name: found.makespan for name, found in runs.items()})
    assert shares["pairs"] >= 0.8 and shares["apart"] < 0.1
    assert runs["pairs"].makespan < runs["apart"].makespan


def test_dualpipev_interleaved_and_1f1b_side_by_side():
    """Equal work: 1F1B holds the two stages of a rank as one. All-to-alls take half a segment's forward."""
    times = {"interleaved": run(experts(interleaved, 8, 4, 16)).makespan, "dualpipev": run(experts(dualpipev, 8, 4, 16)).makespan}
    model = sketch(8, parts=PARTS, batch=32)
    halved = [replace(segment, tags={**segment.tags, "PP": segment.tags["PP"] // 2}) for segment in model.segments]
    dag = training_dag(replace(model, segments=tuple(halved)))
    times["1f1b"] = run(apply(dag, one_f_one_b(4, 16, replicas=2, experts=True))).makespan
    print({name: f"{times['1f1b'] / time:.2f}" for name, time in times.items()})
    assert times["dualpipev"] < times["interleaved"] < times["1f1b"], times


# ---------------------------------------------------------------------- where data parallelism's reductions go
def placed(**options):
    """Six layers with experts on one pair of devices, two microbatches: reductions become ready while all-to-alls still come."""
    dag = training_dag(sketch(6, parts=PARTS, batch=8))
    return apply(dag, [Split({}, "MB", 2), Place({}, (0, 1)), Shard({"EP": "*"}, (0, 1), stream="ep"), Replicate({"EP": "-"}, (0, 1), **options)])


def late(dag, spans):
    """By how much all-to-alls start after their tokens are there, in all."""
    return sum(spans[n.name].start - max(spans[before.name].end for before in dag.before(n.name)) for n in dag.of(ALL_TO_ALL))


def test_three_placements_of_reductions():
    def duration(node):
        return nominal(node) if node.kind != ALL_REDUCE else 3.0 / dag.bucket_of(node).parts

    found = {}
    for name, options in {"own": {"reduce_stream": "dp"}, "shared": {"reduce_stream": "ep"},
                          "slotted": {"reduce_stream": "ep", "bucket_size": 0.002, "slotted": True}}.items():  # fmt: skip
        dag = placed(**options)
        spans = run(dag, duration).spans
        found[name] = late(dag, spans)
        started = sorted(spans, key=lambda n: spans[n].start)
        stream = [dag.nodes[n].kind for n in started if dag.nodes[n].stream == "ep"]
        if name == "slotted":
            last = max(index for index, kind in enumerate(stream) if kind == ALL_TO_ALL)
            between = stream[:last]
            assert ALL_REDUCE in between and (ALL_REDUCE, ALL_REDUCE) not in set(zip(between, between[1:])), "one between two all-to-alls"
        if name == "own":
            assert ALL_REDUCE not in stream
    print(found)
    assert found["own"] == 0 and found["slotted"] < found["shared"] / 2, found


# ---------------------------------------------------------------------- ZeRO-3
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_prefetched_gather_comes_in_time_and_not_before(prefetch):
    """At any moment at most prefetch + 1 buckets are gathered and not yet let go; with prefetch the computation waits less."""
    dag = training_dag(sketch(6, batch=8))
    dag = apply(dag, [Split({}, "MB", 2), Place({}, (0, 1)), Replicate({}, (0, 1), shard_params=True, prefetch=prefetch)])
    found = run(dag)
    events = []
    for gather in dag.of("ALL_GATHER"):
        users = [found.spans[node.name].end for node in dag.after(gather.name)]
        events += [(found.spans[gather.name].start, 1), (max(users), -1)]
    held = most = 0
    for _, change in sorted(events):
        held += change
        most = max(most, held)
    assert most == prefetch + 1
    computed = sum(nominal(node) for node in dag.of(COMPUTE))
    if prefetch == 0:
        assert found.makespan > computed + 0.25 * 10, "every gather is waited for"
    else:
        assert found.makespan < computed + 3, "only the first is waited for"
