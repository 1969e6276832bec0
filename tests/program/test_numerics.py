"""A rewritten DAG computes what the model computes: losses and every parameter after several steps, in float64, whatever the strategy."""

from dataclasses import replace

import pytest
import torch

from rrfp.errors import ConfigurationError
from rrfp.program.builders import BUILDERS
from rrfp.program.directives import Order, Place, Replicate, Shard, Split, apply
from rrfp.program.training import training_dag
from tests.program.interpreter import Devices
from tests.program.models import chain, diamond

PARALLEL = {
    "pp": {}, "dp": {"replicas": 2}, "zero1": {"replicas": 2, "zero": 1}, "zero2": {"replicas": 2, "zero": 2}, "zero3": {"replicas": 3, "zero": 3},
    "parts": {"replicas": 2, "bucket_size": 1e-4}, "ep": {"replicas": 2, "experts": True}, "ep-zero2": {"replicas": 2, "zero": 2, "experts": True},
    "ep-zero3": {"replicas": 2, "zero": 3, "experts": True},
}  # fmt: skip


def compare(model, dag, *, microbatches, replicas, steps=3, rows=2):
    """The largest difference in losses and parameters between the DAG and one process. Inputs differ between steps."""
    size = rows * microbatches * replicas
    batches = [model.batch(size, seed) for seed in range(steps)]
    devices = Devices(dag, model.functions, model.parameters, model.traced.loss)
    worst = 0.0
    for batch, (losses, weights) in zip(batches, model.reference(batches, pieces=microbatches * replicas), strict=True):
        found = devices.step(batch)
        ours = torch.tensor([loss for device in sorted(found) for loss in found[device]])
        assert len(ours) == len(losses), "every microbatch's loss must be returned"
        worst = max(worst, (ours.sort()[0] - torch.tensor(losses).sort()[0]).abs().max().item())
        for name, wanted in weights.items():
            for own in devices.whole(name):
                worst = max(worst, (own - wanted).abs().max().item())
    return worst, devices


def stages_of(name, ranks):
    return 2 * ranks if name in ("interleaved", "zb-v", "dualpipev") else ranks


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_with_every_parallelism(name, parallel, full):
    options = PARALLEL[parallel]
    for ranks, microbatches in ((2, 4), (3, 6)) if full else ((2, 4),):
        replicas = options.get("replicas", 1)
        model = chain(stages_of(name, ranks), 2 * microbatches, experts=options.get("experts", False))
        dag = apply(training_dag(model.traced), BUILDERS[name](ranks, microbatches, **options))
        worst, _ = compare(model, dag, microbatches=microbatches, replicas=replicas, steps=3 if full else 2)
        assert worst < 1e-12, f"{name} {parallel}: differs by {worst}"


# ---------------------------------------------------------------------- what only a directive keeps right
def bypass(dag, kind):
    """The DAG without its nodes of a kind: what came to them goes past them."""
    draft = dag.edit()
    for node in dag.of(kind):
        for edge in dag.incoming[node.name]:
            onward = [other for other in dag.outgoing[node.name] if other.tensor == edge.tensor]
            draft.move([edge], [other._replace(source=edge.source) for other in onward])
        draft.move(dag.outgoing[node.name], [])
        del draft.nodes[node.name]
    return draft.dag()


def misdirect(dag):
    """The DAG with tokens that go to the other device's experts."""
    draft = dag.edit()
    for node in dag.of("ALL_TO_ALL"):
        draft.nodes[node.name] = replace(node, groups=tuple(group[::-1] for group in node.groups))
    return draft.dag()


@pytest.mark.parametrize("wrong, options", [
    (lambda dag: bypass(dag, "ALL_REDUCE"), {"replicas": 2}), (lambda dag: bypass(dag, "ALL_REDUCE"), {"replicas": 2, "experts": True}),
    (misdirect, {"replicas": 2, "experts": True}),
], ids=["reduction", "reduction-beside-experts", "exchange"])  # fmt: skip
def test_numbers_differ_without_a_directives_communication(wrong, options):
    """Negative control: the proof above sees it when a reduction is left out, or an exchange of tokens goes wrong."""
    model = chain(2, 8, experts=options.get("experts", False))
    dag = apply(training_dag(model.traced), BUILDERS["1f1b"](2, 4, **options))
    assert compare(model, dag, microbatches=4, replicas=2, steps=2)[0] < 1e-12
    assert compare(model, wrong(dag), microbatches=4, replicas=2, steps=2)[0] > 1e-4


def test_a_missing_directive_is_refused():
    model = chain(2, 8, experts=True)
    directives = BUILDERS["1f1b"](2, 4, replicas=2, experts=True)
    for kind in (Replicate, Shard):
        with pytest.raises(ConfigurationError, match=r"place: UPDATE:block\d\.\w+ .*nothing keeps them equal; replicate it, shard it"):
            apply(training_dag(model.traced), [each for each in directives if not isinstance(each, kind)])
    without_split = [each for each in directives if not isinstance(each, Split)]
    with pytest.raises(ConfigurationError, match="order 0, position 0: {PP=0, MB=0, PASS=F}: matches nothing: no node has tag MB"):
        apply(training_dag(model.traced), without_split)


def test_parameters_that_were_not_gathered_would_be_seen():
    """Negative control of ZeRO-3: a compute node whose gather is taken away reads no numbers."""
    model = chain(2, 8)
    dag = apply(training_dag(model.traced), BUILDERS["1f1b"](2, 4, replicas=2, zero=3))
    draft = dag.edit()
    gather = next(node for node in dag.of("ALL_GATHER"))
    draft.move([edge for edge in dag.edges if gather.name in edge[:2]], [])
    del draft.nodes[gather.name]
    with pytest.raises(AssertionError, match="parameters were not gathered"):
        compare(model, draft.dag(), microbatches=4, replicas=2, steps=1)


# ---------------------------------------------------------------------- shapes that no builder has
def entry(tag, index, kind, m):
    return ({tag: index, "MB": m, "PASS": kind},)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_strategy_that_nobody_shipped(replicas):
    """Two encoders that join, stages of unlike size, backwards in another order than forwards, one of them split."""
    model = diamond(8)

    def on(rank):
        return tuple(range(rank * replicas, (rank + 1) * replicas))

    directives = [
        Split({}, "MB", 4), Place({"VIT": "*"}, on(0)), Place({"TEXT": "*"}, on(1)), Place({"LLM": "*"}, on(2)),
        Order(tuple(entry("VIT", "*", "F", m) for m in range(4)) + tuple(entry("VIT", "*", "B", m) for m in (2, 0, 3, 1))),
        Order(tuple(entry("TEXT", 0, "F", m) for m in range(4)) + tuple(entry("TEXT", 0, kind, m) for m in (2, 0, 3, 1) for kind in "IW")),
        Order(tuple(entry("LLM", "*", "F", m) for m in range(4)) + tuple(entry("LLM", "*", "B", m) for m in (2, 0, 3, 1))),
    ]  # fmt: skip
    if replicas > 1:
        directives += [Replicate({tag: "*"}, on(rank)) for rank, tag in enumerate(("VIT", "TEXT", "LLM"))]
    dag = apply(training_dag(model.traced), directives)
    assert compare(model, dag, microbatches=4, replicas=replicas)[0] < 1e-12


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_parameter_of_two_stages_is_reduced_over_both(zero):
    model = chain(3, 8, tied=True)
    dag = apply(training_dag(model.traced), BUILDERS["1f1b"](3, 4, replicas=2, zero=zero))
    assert [node.groups for node in dag.of("ALL_REDUCE") if node.what == "tied.block0"] == [((0, 4), (1, 5))]
    worst, devices = compare(model, dag, microbatches=4, replicas=2)
    assert worst < 1e-12 and len(devices.whole("block0.w")) == 4


def test_a_parameter_of_two_segments_on_one_device_is_updated_once():
    model = chain(3, 8, tied=True)
    dag = apply(training_dag(model.traced), [Split({}, "MB", 4), Place({}, (0, 1)), Replicate({}, (0, 1))])
    assert "UPDATE:block2" not in dag.nodes
    assert compare(model, dag, microbatches=4, replicas=2)[0] < 1e-12


def test_a_part_is_split_once_more():
    """The middle stage runs every microbatch in two halves: what comes in is sliced, what goes out is joined."""
    model = chain(3, 16)
    directives = [Split({}, "MB", 4), Split({"PP": 1}, "HALF", 2), *(Place({"PP": stage}, (0,)) for stage in range(3))]
    dag = apply(training_dag(model.traced), directives)
    assert len([node for node in dag.of("COMPUTE") if node.what == "block1"]) == 16
    worst, _ = compare(model, dag, microbatches=4, replicas=1, rows=4)
    assert worst < 1e-12


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_in_fewer_pieces_than_devices(zero):
    """Four replicas, experts in two pieces: each piece has two replicas, which are kept equal."""
    model = chain(2, 8, experts=True)
    kept = {"shard_optimizer": zero >= 1, "shard_grads": zero >= 2, "shard_params": zero >= 3}
    directives = [Split({}, "MB", 2), Place({}, (0, 1, 2, 3)), Shard({"EP": "*"}, (0, 1, 2, 3), ways=2), Replicate({}, (0, 1, 2, 3), **kept)]
    dag = apply(training_dag(model.traced), directives)
    assert {node.groups for node in dag.of("ALL_TO_ALL")} == {((0, 1), (2, 3))}
    assert ((0, 2), (1, 3)) in {node.groups for node in dag.of("ALL_REDUCE", "REDUCE_SCATTER")}
    assert compare(model, dag, microbatches=2, replicas=4)[0] < 1e-12


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_gathered_buckets_are_bounded(prefetch):
    """ZeRO-3 over four layers on one device: never more than prefetch + 1 buckets, while eight microbatches go forward and back."""
    model = chain(4, 16)
    directives = [Split({}, "MB", 4), Place({}, (0, 1)), Replicate({}, (0, 1), shard_params=True, prefetch=prefetch)]
    dag = apply(training_dag(model.traced), directives)
    worst, devices = compare(model, dag, microbatches=4, replicas=2, steps=2)
    assert worst < 1e-12 and max(devices.most_gathered.values()) == min(prefetch, 4) + 1
    unbound = dag.edit()
    unbound.edges = {edge: None for edge in dag.edges if edge.kind == "data"}
    worst, devices = compare(model, unbound.dag(), microbatches=4, replicas=2, steps=1)
    assert max(devices.most_gathered.values()) == 5, "negative control: without temporal edges all five lie there at once"
