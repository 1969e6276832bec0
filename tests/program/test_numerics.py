"""A rewritten DAG computes what the model computes: losses and every parameter after several steps, in float64, whatever the strategy."""

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
    "parts": {"replicas": 2, "bucket_size": 1e-4}, "ep": {"replicas": 2, "experts": True}, "ep-zero2": {"replicas": 4, "zero": 2, "experts": True},
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
