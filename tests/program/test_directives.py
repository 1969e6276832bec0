"""Each directive is a pure rewrite; what it refuses names itself, its filter or tag, and the node."""

import random

import pytest

from rrfp.errors import ConfigurationError
from rrfp.program.builders import dualpipev, one_f_one_b, zb_1
from rrfp.program.dag import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPUTE, RECV, REDUCE_SCATTER, SEND, TEMPORAL, UPDATE, Node
from rrfp.program.directives import Order, Place, Replicate, Shard, Split, apply
from rrfp.program.filters import matches, select
from rrfp.program.text import print_dag
from rrfp.program.traced import Segment, Tensor, Traced, sketch
from rrfp.program.training import training_dag

PARTS = ("attention", "experts", "combine")


def program(*directives, stages=2, parts=(), batch=8, **sizes):
    return apply(training_dag(sketch(stages, parts=parts, batch=batch, **sizes)), directives)


def refused(message, *directives, **model):
    with pytest.raises(ConfigurationError, match=message):
        program(*directives, **model)


def entry(stage, kind, m):
    return ({"PP": stage, "MB": m, "PASS": kind},)


# ---------------------------------------------------------------------- filters
@pytest.mark.parametrize("filter, found", [
    ({}, True), ({"PP": 1}, True), ({"PP": 2}, False), ({"PP": "*"}, True), ({"EP": "*"}, False), ({"EP": "-"}, True), ({"PP": "-"}, False),
    ({"PP": 1, "MB": 3}, True), ({"PP": 1, "MB": 2}, False), ({"PASS": "F"}, True), ({"PASS": "B"}, False), ({"MB": "*", "PASS": "F"}, True),
])  # fmt: skip
def test_filters(filter, found):
    assert matches(filter, Node(COMPUTE, "s", "F", {"PP": 1}, {"MB": 3})) is found


def test_a_filter_that_finds_nothing_names_the_tag():
    nodes = [Node(COMPUTE, f"s{i}", "F", {"PP": i}) for i in range(11)]
    with pytest.raises(ConfigurationError, match=r"place: {PP=12}: matches nothing: the nodes have PP = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"):
        select({"PP": 12}, nodes, where="place")
    with pytest.raises(ConfigurationError, match="no node has tag EP"):
        select({"PP": 1, "EP": 0}, nodes, where="place")
    with pytest.raises(ConfigurationError, match="no node has all of these tags"):
        select({"PP": 1, "PASS": "F", "MB": "-", "X": 0}, [*nodes, Node(COMPUTE, "t", "F", {"X": 0})], where="place")


@pytest.mark.parametrize("filter, message", [
    ({"PP": -1}, r'directive 0 \(place\): PP -1: must be an index, "\*" \(any\) or "-" \(not tagged\)'),
    ({"PP": "all"}, r"PP 'all': must be"), ({"PASS": "G"}, "PASS 'G': must be F, B, I or W"), ({"PP": True}, "PP True: must be"),
])  # fmt: skip
def test_what_is_no_filter_is_refused(filter, message):
    refused(message, Place(filter, (0,)))


# ---------------------------------------------------------------------- purity and order of application
def test_a_rewrite_leaves_its_dag_alone():
    before = training_dag(sketch(4, batch=16))
    text = print_dag(before)
    apply(before, zb_1(4, 8, replicas=2, zero=3))
    assert print_dag(before) == text


def test_directives_apply_in_one_fixed_order(seed):
    directives = zb_1(4, 8, replicas=2, zero=2)
    wanted = apply(training_dag(sketch(4, batch=16)), directives)
    shuffled = random.Random(seed).sample(directives, len(directives))
    found = apply(training_dag(sketch(4, batch=16)), shuffled)
    # Buckets are numbered as their directives come; all else is equal.
    assert len(found.nodes) == len(wanted.nodes) and {n for n in found.nodes if "bucket" not in n} == {n for n in wanted.nodes if "bucket" not in n}


# ---------------------------------------------------------------------- split
def test_split_clones_computation_and_not_updates():
    dag = program(Split({}, "MB", 4))
    assert len([n for n in dag.of(COMPUTE) if n.phase == "F"]) == 8 and len(dag.of(UPDATE)) == 2
    assert {edge.source for edge in dag.incoming["UPDATE:stage0"]} == {f"B:stage0[MB={m}]" for m in range(4)}
    assert [edge.source for edge in dag.incoming["F:stage1[MB=2]"]] == ["F:stage0[MB=2]"]


def test_a_part_of_a_microbatch_gets_its_slice_and_gives_its_piece():
    dag = program(Split({}, "MB", 2), Split({"PP": 1}, "HALF", 2), stages=3)
    assert {edge.source for edge in dag.incoming["F:stage1[MB=1,HALF=0]"]} == {"F:stage0[MB=1]"}
    assert {edge.source for edge in dag.incoming["F:stage2[MB=1]"]} == {"F:stage1[MB=1,HALF=0]", "F:stage1[MB=1,HALF=1]"}
    assert dag.dims == {"MB": 2, "HALF": 2}


@pytest.mark.parametrize("directives, message", [
    ([Split({}, "MB", 3)], r"split {}: F:stage0 {PP=0}: batch has 8 along dimension 0, which 3 pieces do not divide"),
    ([Split({}, "MB", 4), Split({}, "MB", 2)], "split {}: dim_name MB: is a tag already"),
    ([Split({}, "PP", 4)], "split {}: dim_name PP: is a tag already"),
    ([Split({}, "MB", 0)], r"directive 0 \(split\): count 0: must be at least 1"),
    ([Split({"PASS": "F"}, "MB", 2)], "split {PASS=F}: PASS: a forward and its backward are split together"),
    ([Split({"EP": "-"}, "MB", 2)], r"split {EP=-}: F:stage0.combine {PP=0}: lies behind a node that is not split and comes after one that is"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused(directives, message):
    refused(message, *directives, parts=PARTS if "EP" in directives[-1].filter else ())


def test_an_order_splits_the_backwards_that_it_names():
    dag = program(Split({}, "MB", 2), Place({}, (0,)), Order((*(entry(0, "F", m) for m in (0, 1)), *(entry(1, "F", m) for m in (0, 1)),
        entry(1, "B", 0), entry(1, "I", 1), entry(0, "B", 0), entry(0, "I", 1), entry(1, "W", 1), entry(0, "W", 1))))  # fmt: skip
    assert {n.name for n in dag.of(COMPUTE) if n.phase != "F"} == {
        "B:stage0[MB=0]", "B:stage1[MB=0]", "I:stage0[MB=1]", "I:stage1[MB=1]", "W:stage0[MB=1]", "W:stage1[MB=1]"}
    assert {edge.tensor for edge in dag.incoming["W:stage1[MB=1]"] if edge.kind == "data"} == {"saved.stage1", "partial.stage1"}
    assert {edge.source for edge in dag.incoming["UPDATE:stage1"]} == {"B:stage1[MB=0]", "W:stage1[MB=1]"}


def test_a_segment_that_trains_nothing_has_no_weight_gradient():
    row = (*(entry(0, kind, 0) for kind in "F"), *(entry(1, kind, 0) for kind in "FIW"), *(entry(0, kind, 0) for kind in "IW"))
    dag = program(Split({}, "MB", 1), Place({}, (0,)), Order(row), parts=("linear", "activation"), parameters={"linear": 8})
    assert {n.name.partition("[")[0] for n in dag.of(COMPUTE) if n.phase == "W"} == {"W:stage0.linear", "W:stage1.linear"}


# ---------------------------------------------------------------------- place
def test_data_between_devices_is_sent_once_and_read_where_it_is_needed():
    """Two readers on another device: one message. Its stream says the direction, unless the directive names one."""
    tensors = {name: Tensor((4, 2)) for name in ("x", "a", "b", "c")} | {"w": Tensor((2,), batch=None)}
    model = Traced((Segment("one", {"S": 0}, ("x",), ("a",), ("w",)), Segment("left", {"S": 1}, ("a",), ("b",)),
                    Segment("join", {"S": 1}, ("a", "b"), ("c",))), tensors, "c")  # fmt: skip
    dag = apply(training_dag(model), [Place({"S": 0}, (0, 1)), Place({"S": 1}, (2, 3)), Replicate({"S": 0}, (0, 1))])
    assert [n.name for n in dag.of(SEND)] == ["SEND:F:one.a>2", "SEND:B:join.a>0", "SEND:B:left.a>0"]
    assert {n.name: (n.devices, n.peers, n.stream) for n in dag.of(SEND, RECV) if ":F:" in n.name} == {
        "SEND:F:one.a>2": ((0, 1), (2, 3), "up"), "RECV:F:one.a>2": ((2, 3), (0, 1), "up")}
    assert {n.name for n in dag.after("RECV:F:one.a>2")} == {"F:left", "F:join"}
    named = apply(training_dag(model), [Place({"S": 0}, (0,), "mine"), Place({"S": 1}, (2,))])
    assert {n.name: n.stream for n in named.of(SEND)} == {"SEND:F:one.a>2": "mine", "SEND:B:join.a>0": "down", "SEND:B:left.a>0": "down"}


def test_without_a_place_everything_is_on_device_0():
    assert {node.devices for node in program(Split({}, "MB", 2)).nodes.values()} == {(0,)}


@pytest.mark.parametrize("directives, message", [
    ([Place({"PP": 0}, (0,))], r"place: F:stage1 {PP=1}: is on no device; place its tag"),
    ([Place({}, (0,)), Place({"PP": 1}, (1,))], r"place {PP=1}: F:stage1 {PP=1}: is placed on \[0\] already; place it once"),
    ([Place({"PP": 0}, (0, 1)), Place({"PP": 1}, (1, 2))], r"place: F:stage1 .*: runs on \[1, 2\], but device 1 is also in \[0, 1\]"),
    ([Place({"PP": 0}, (0, 1)), Place({"PP": 1}, (2,))], r"place: F:stage0 .*: data goes between \[0, 1\] and \[2\]; .* equally many devices"),
    ([Place({"PASS": "F"}, (0,))], "place {PASS=F}: PASS: a backward runs where its forward ran"),
    ([Place({}, ())], r"directive 0 \(place\): devices \[\]: must be different ranks"),
    ([Place({}, (1, 1))], r"devices \[1, 1\]: must be different ranks"),
    ([Place({}, (0, 1))], r"place: UPDATE:stage\d .*: its parameters lie on \[0, 1\], and nothing keeps them equal; replicate it, shard it"),
    ([Split({}, "MB", 2), Place({"MB": 0}, (0,)), Place({"MB": 1}, (1,))], r"would run on \[1\], but other pieces of its segment on \[0\]"),
])  # fmt: skip
def test_what_cannot_be_placed_is_refused(directives, message):
    refused(message, *directives)


# ---------------------------------------------------------------------- shard
def test_all_to_alls_lie_around_experts_in_both_passes():
    dag = program(Split({}, "MB", 2), Place({}, (0, 1)), Shard({"EP": "*"}, (0, 1), stream="ep"), Replicate({"EP": "-"}, (0, 1)),
                  stages=1, parts=PARTS)
    assert {n.name for n in dag.of(ALL_TO_ALL) if n.dims["MB"] == 0} == {
        f"ALL_TO_ALL:{phase}:stage0.experts.{side}[MB=0]" for phase in "FB" for side in ("in", "out")}
    assert {n.stream for n in dag.of(ALL_TO_ALL)} == {"ep"}
    assert [n.name for n in dag.before("F:stage0.experts[MB=0]")] == ["ALL_TO_ALL:F:stage0.experts.in[MB=0]"]
    # The residual goes past the experts, and their parameters are not reduced.
    assert "F:stage0.attention[MB=0]" in {n.name for n in dag.before("F:stage0.combine[MB=0]")}
    assert {name for bucket in dag.buckets.values() for name in bucket.segments} == {"stage0.attention", "stage0.combine"}


def test_neighbouring_expert_segments_exchange_once():
    dag = program(Place({}, (0, 1)), Shard({"EP": "*"}, (0, 1)), Replicate({"EP": "-"}, (0, 1)), stages=2, parts=("attention", "experts", "combine"))
    assert len(dag.of(ALL_TO_ALL)) == 8
    tags = {"PP": 0, "EP": 0}
    tensors = {name: Tensor((4, 2)) for name in "xabcd"} | {f"w{i}": Tensor((2,), batch=None) for i in range(4)}
    chain = [Segment(f"s{i}", tags if i in (1, 2) else {}, ("xabc"[i],), ("abcd"[i],), (f"w{i}",)) for i in range(4)]
    two = apply(training_dag(Traced(tuple(chain), tensors, "d")), [Place({}, (0, 1)), Shard({"EP": 0}, (0, 1)), Replicate({"EP": "-"}, (0, 1))])
    assert len(two.of(ALL_TO_ALL)) == 4


@pytest.mark.parametrize("directives, message", [
    ([Place({}, (0, 1)), Shard({"EP": "*"}, (0,))], r"shard {EP=\*}: devices \[0\]: .*experts.* is placed on \[0, 1\]; name the same devices"),
    ([Place({}, (0, 1)), Shard({"EP": 0}, (0, 1), ways=3)], r"directive 1 \(shard\): ways 3: must divide the 2 devices"),
    ([Place({}, (0, 1)), Shard({"EP": 0}, (0, 1)), Shard({"EP": "*"}, (0, 1))], r"shard {EP=\*}: .*: its neighbour ALL_TO_ALL:.* sharded once"),
    ([Place({"EP": "-"}, (0, 1)), Place({"EP": 0}, (2, 3)), Shard({"EP": "*"}, (2, 3))],
     r"shard .*: its neighbour (RECV|SEND):.* is no computation on"),
])  # fmt: skip
def test_what_cannot_be_sharded_is_refused(directives, message):
    refused(message, *directives, stages=1, parts=PARTS)


# ---------------------------------------------------------------------- replicate
@pytest.mark.parametrize("zero, counts", [
    ({}, {ALL_REDUCE: 2, REDUCE_SCATTER: 0, ALL_GATHER: 0}), ({"shard_optimizer": True}, {ALL_REDUCE: 0, REDUCE_SCATTER: 2, ALL_GATHER: 2}),
    ({"shard_grads": True}, {ALL_REDUCE: 0, REDUCE_SCATTER: 8, ALL_GATHER: 2}),
    # One bucket is all that a device uses: it is gathered once, and stays.
    ({"shard_params": True}, {ALL_REDUCE: 0, REDUCE_SCATTER: 8, ALL_GATHER: 2}),
])  # fmt: skip
def test_collectives_of_each_zero_stage(zero, counts):
    rows = [directive for directive in one_f_one_b(2, 4, replicas=2) if not isinstance(directive, Replicate)]
    dag = program(*rows, *(Replicate({"PP": stage}, (2 * stage, 2 * stage + 1), **zero) for stage in (0, 1)))
    assert {kind: len(dag.of(kind)) for kind in counts} == counts


def test_buckets_follow_the_backward_and_large_segments_are_cut():
    """4096 float32 are 16 KiB. Two segments fit in 33 KiB; of 6 KiB a segment takes three."""
    def buckets(size):
        dag = program(Place({}, (0, 1)), Replicate({}, (0, 1), bucket_size=size / 1024), stages=5)
        return [(bucket.segments, bucket.part, bucket.parts) for bucket in dag.buckets.values()]

    assert buckets(33) == [(("stage4", "stage3"), 0, 1), (("stage2", "stage1"), 0, 1), (("stage0",), 0, 1)]
    assert buckets(6)[:4] == [(("stage4",), 0, 3), (("stage4",), 1, 3), (("stage4",), 2, 3), (("stage3",), 0, 3)]


@pytest.mark.parametrize("directives, message", [
    ([Replicate({"PP": 0}, (0, 1)), Replicate({}, (0, 1))], r"replicate {}: stage0: is replicated already \(bucket0\)"),
    ([Replicate({}, (0, 1, 2))], r"replicate {}: devices \[0, 1, 2\]: .* is placed on \[0, 1\]"),
    ([Replicate({}, (0, 1), prefetch=-1)], "prefetch -1: must be at least 0"),
    ([Replicate({}, (0, 1), bucket_size=0.0)], "bucket_size 0.0: must be above 0 MB"),
    ([Replicate({}, (0, 1), bucket_size=1e-7)], "bucket_size 1e-07: must be above 0 MB, at least a byte"),
    ([Replicate({}, (0, 1), bucket_size=float("inf"))], "bucket_size inf: must be .* finite"),
])  # fmt: skip
def test_what_cannot_be_replicated_is_refused(directives, message):
    refused(message, Place({}, (0, 1)), *directives)


def test_a_part_without_parameters_needs_no_replicas():
    tensors = {name: Tensor((4, 2)) for name in "xab"} | {"w": Tensor((2,), batch=None)}
    model = Traced((Segment("one", {"A": 0}, ("x",), ("a",), ("w",)), Segment("two", {"A": 1}, ("a",), ("b",))), tensors, "b")
    with pytest.raises(ConfigurationError, match="replicate {A=1}: no trained parameters lie in it; leave it out"):
        apply(training_dag(model), [Place({}, (0, 1)), Replicate({"A": 0}, (0, 1)), Replicate({"A": 1}, (0, 1))])
    assert len(apply(training_dag(model), [Place({}, (0, 1)), Replicate({"A": 0}, (0, 1))]).of(ALL_REDUCE)) == 1


# ---------------------------------------------------------------------- order
def test_groups_are_joined_by_temporal_edges_from_last_to_first():
    dag = program(*one_f_one_b(2, 4), parts=PARTS)
    temporal = {(e.source, e.destination) for e in dag.edges if e.kind == TEMPORAL}
    assert ("F:stage1.combine[MB=0]", "B:stage1.combine[MB=0]") in temporal
    assert ("B:stage1.attention[MB=0]", "F:stage1.attention[MB=1]") in temporal
    assert not any("experts" in name for edge in temporal for name in edge), "nothing is ordered inside a group"


def test_a_pair_is_not_ordered_within():
    dag = program(*dualpipev(2, 6), stages=4, batch=12)
    temporal = {frozenset((e.source, e.destination)) for e in dag.edges if e.kind == TEMPORAL}
    assert frozenset(("F:stage0[MB=4]", "B:stage3[MB=2]")) not in temporal
    # Rank 1's first pair is none, and its next has both behind it.
    assert {e.source for e in dag.incoming["F:stage2[MB=2]"] if e.kind == TEMPORAL} == {"B:stage2[MB=0]"}
    assert {e.source for e in dag.incoming["F:stage1[MB=3]"] if e.kind == TEMPORAL} == {"F:stage2[MB=2]", "B:stage1[MB=0]"}


@pytest.mark.parametrize("row, message", [
    ((entry(0, "F", 0), entry(0, "F", 0)), r"order 0, position 1: F:stage0\[MB=0\] .*: stands at position 0 already; list it once"),
    ((entry(0, "F", 0), entry(1, "F", 0)), r"order 0, position 1: F:stage1\[MB=0\] .*: runs on \[1\], .* on \[0\]; a row orders one device"),
    ((entry(0, "F", 0), entry(0, "B", 0)), r"order 0: F:stage0\[MB=1\] .*: is missing; list every computation on \[0\]"),
    ((entry(0, "F", 2),), r"order 0, position 0: {PP=0, MB=2, PASS=F}: matches nothing: the nodes have MB = 0, 1"),
    ((*(entry(0, "F", m) for m in (0, 1)), entry(0, "I", 0), entry(0, "B", 0)), "another entry splits this backward in I and W"),
    ((entry(0, "B", 0), entry(0, "F", 0), entry(0, "F", 1), entry(0, "B", 1)), "program: waits in a circle: .*; the order rows contradict"),
    (((),), r"directive 3 \(order\): position 0: is empty"),
])  # fmt: skip
def test_what_cannot_be_ordered_is_refused(row, message):
    refused(message, Split({}, "MB", 2), Place({"PP": 0}, (0,)), Place({"PP": 1}, (1,)), Order(row))


def test_two_rows_for_one_device_are_refused():
    half = Order((entry(0, "F", 0), entry(0, "B", 0)))
    refused(r"its devices \[0\] have order 0 already", Split({}, "MB", 2), Place({}, (0,)), half, Order((entry(0, "F", 1), entry(0, "B", 1))))


def test_rows_that_wait_for_each_other_are_refused_with_the_circle():
    """Rank 1 wants the backward of microbatch 1 before that of 0, which rank 0 needs before it runs forward 1."""
    rows = [Order((entry(0, "F", 0), entry(0, "B", 0), entry(0, "F", 1), entry(0, "B", 1))),
            Order((entry(1, "F", 0), entry(1, "F", 1), entry(1, "B", 1), entry(1, "B", 0)))]  # fmt: skip
    refused(r"waits in a circle: .*F:stage0\[MB=1\] {PP=0}.*B:stage1\[MB=0\]",
            Split({}, "MB", 2), Place({"PP": 0}, (0,)), Place({"PP": 1}, (1,)), *rows)
