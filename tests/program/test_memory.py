"""Bytes on a device, against the formula of each ZeRO stage."""

import pytest

from rrfp.program.builders import one_f_one_b
from rrfp.program.directives import Place, Replicate, Shard, Split, apply
from rrfp.program.lower import lower
from rrfp.program.memory import memory
from rrfp.program.traced import sketch
from rrfp.program.training import training_dag

SEGMENT = 4096 * 4  # bytes


@pytest.mark.parametrize("zero, parameters, gradients, optimizer, scattered, pool", [
    (0, 4, 4, 8, 0, 0), (1, 4, 6, 4, 0, 0), (2, 4, 2, 4, 2, 0), (3, 2, 2, 4, 2, 2),
])  # fmt: skip
def test_zero_stages(zero, parameters, gradients, optimizer, scattered, pool):
    """A stage of four segments on two replicas, Adam, prefetch 1. In segments' parameters."""
    dag = apply(training_dag(sketch(2, parts="abcd", batch=8)), one_f_one_b(2, 4, replicas=2, zero=zero))
    found = memory(lower(dag), 0)
    wanted = [part * SEGMENT for part in (parameters, gradients, optimizer, pool, scattered)]
    assert [found.parameters, found.gradients, found.optimizer, found.pool, found.scattered] == wanted and found.total == sum(wanted)


def test_the_pool_grows_with_prefetch_and_never_to_all_layers():
    def pool(prefetch):
        dag = training_dag(sketch(8, batch=8))
        directives = [Split({}, "MB", 2), Place({}, (0, 1)), Replicate({}, (0, 1), shard_params=True, prefetch=prefetch)]
        return memory(lower(apply(dag, directives)), 0).pool // SEGMENT

    assert [pool(prefetch) for prefetch in (0, 1, 3)] == [1, 2, 4]


def test_experts_lie_in_pieces():
    dag = training_dag(sketch(1, parts=("attention", "experts", "combine"), parameters={"attention": 4096, "experts": 4 * 4096}, batch=8))
    directives = [Place({}, (0, 1)), Shard({"EP": "*"}, (0, 1)), Replicate({"EP": "-"}, (0, 1))]
    assert memory(lower(apply(dag, directives)), 0).parameters == (1 + 2) * SEGMENT
