"""Three and four kinds of parallelism at once, up to eight ranks: bitwise Megatron's own schedule, as in test_parallelism.py."""

import pytest
from group import Group

# Expert tensor parallelism is 1: with more, Megatron's own gather fails on gloo where ranks have different numbers of tokens.
LAYOUTS = {
    "PP2xTP2xEP2": (dict(ranks=4, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
                    dict(experts=4, sequence_parallel=True, expert_tensor_parallel_size=1)),
    "PP2xVPP2xEP2": (dict(ranks=4, expert_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), dict(experts=4)),
    "PP2xTP2xCP2": (dict(ranks=8, tensor_model_parallel_size=2, context_parallel_size=2), dict(sequence_parallel=True)),
    "PP2xTP2xVPP2xDP2": (dict(ranks=8, tensor_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
                         dict(sequence_parallel=True, distributed=True, overlap=True, gather=True)),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bitwise_equal_under_delays_that_differ_between_the_ranks(layout, full):
    if not full:
        pytest.skip("only with --all: each kind alone, and two at once, are in test_parallelism.py")
    sizes, settings = LAYOUTS[layout]
    with Group(pipeline=2, **sizes) as group:
        for order in ("microbatch", "megatron"):
            dropout = {"dropout": 0.0} if order == "microbatch" and "VPP" in layout else {}
            options = {"hint": "bf", "limit": "16", "order": order}
            where = group.run("same", microbatches=8, seeds=list(range(5)), steps=2, options=options, **settings | dropout, deadline=250)
            assert where == [None] * group.ranks, order
