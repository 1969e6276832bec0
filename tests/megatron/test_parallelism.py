"""Losses, every gradient and the weights at every kind of parallelism, against Megatron's own schedule at the same sizes: bitwise.

Delays differ between the ranks of one domain, so that what is ready differs too.
"""

import pytest
from group import Group

LAYOUTS = {
    "PP2xTP2": dict(ranks=4, pipeline=2, tensor_model_parallel_size=2),
    "PP2xEP2": dict(ranks=4, pipeline=2, expert_model_parallel_size=2),
    "PP2xCP2": dict(ranks=4, pipeline=2, context_parallel_size=2),
    "PP2xVPP2": dict(ranks=2, virtual_pipeline_model_parallel_size=2),
    "PP4xVPP2": dict(ranks=4, virtual_pipeline_model_parallel_size=2),
    "PP2xTP2xVPP2": dict(ranks=4, pipeline=2, tensor_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "PP2xDP2": dict(ranks=4, pipeline=2),
    "PP2xVPP2xDP2": dict(ranks=4, pipeline=2, virtual_pipeline_model_parallel_size=2),
}
OVERLAPS = {
    "": {},
    "overlap-grad-reduce": {"overlap": True},
    "distributed-optimizer": {"distributed": True},
    "distributed-optimizer-overlaps": {"distributed": True, "overlap": True, "gather": True},
    "distributed-optimizer-aligned": {"distributed": True, "overlap": True, "gather": True, "align": True},
}
CASES = {
    "PP2xTP2": {"": {}, "SP": {"sequence_parallel": True}, "recompute": {"recompute": True, "sequence_parallel": True}},
    "PP2xEP2": {"": {"experts": 4}, "per-token": {"experts": 4, "calculate_per_token_loss": True}},
    "PP2xCP2": {"": {}},
    "PP2xVPP2": {"": {}, "untied": {"tied": False}},
    "PP4xVPP2": {"": {"layers": 8}},
    "PP2xTP2xVPP2": {"SP": {"sequence_parallel": True}},
    "PP2xDP2": OVERLAPS,
    "PP2xVPP2xDP2": OVERLAPS,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    with Group(**LAYOUTS[request.param]) as group:
        yield request.param, group


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", ["microbatch", "megatron"])
def test_bitwise_equal_under_delays_that_differ_between_the_ranks(layout, order, full):
    """20 seeds each. Several chunks of a rank share its random generator: without dropout, or in Megatron's order of forwards."""
    name, group = layout
    chunks = "VPP" in name
    for case, settings in CASES[name].items():
        # With room for every microbatch a rank really chooses.
        for hint, limit, agreement in [("bf", "16", "auto"), *([("announced", "1f1b", "messages")] if full else [])]:
            where = group.run(
                "same", microbatches=8, seeds=list(range(20 if full else 2)), steps=2 if full else 1,
                options={"hint": hint, "limit": limit, "order": order, "agreement": agreement, "decide_ahead": order == "megatron"},
                **settings | ({"dropout": 0.0} if order == "microbatch" and chunks else {}), deadline=900)
            assert where == [None] * group.ranks, (name, case)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name, keep, settings", [
    ("PP2xTP2", (), {"dropout": 0.0}), ("PP2xCP2", (), {"dropout": 0.0}), ("PP2xEP2", ("tp",), {"dropout": 0.0, "experts": 4})],
    ids=["PP2xTP2-none", "PP2xCP2-none", "PP2xEP2-over-TP-alone"])
def test_without_agreement_it_goes_wrong(name, keep, settings):
    """The negative control: were the domain empty, or too small, collectives would mix microbatches or never end."""
    group = Group(**LAYOUTS[name])
    try:
        found = group.run("without_agreement", keep=keep, microbatches=8, seeds=list(range(20)), deadline=200, **settings)
        print(found)
        assert any(found)
    except AssertionError as error:  # a rank that the failure ended
        assert "ended with" in str(error) or "gave no result" in str(error), error
        print(str(error).splitlines()[0])
    finally:
        group.kill()


@pytest.mark.timeout(120)
def test_by_index_gradients_are_reduced_before_they_are_whole():
    """The negative control of the count: replicas that finish their backwards in different orders, in each overlap."""
    def rows(backwards):
        return [[f"{stage}F{m}" for m in range(4)] + [f"{stage}B{m}" for m in backwards] for stage in range(2)]

    with Group(**LAYOUTS["PP2xDP2"]) as group:
        for settings in ({"overlap": True}, {"distributed": True, "overlap": True}):
            by_count, by_index = (
                max(group.run("reduced_by", what=what, rows=[rows([0, 1, 2, 3]), rows([3, 0, 1, 2])], microbatches=4, dropout=0.0, **settings))
                for what in ("count", "index"))
            print(f"{settings}: by count {by_count:.1e}, by index {by_index:.1e}")
            assert by_count < 1e-4 and by_index > 1e-2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("microbatches", [6, 7])
def test_numbers_of_microbatches_that_megatron_refuses(microbatches):
    """PP4xVPP2 against 1F1B over as many stages with one chunk each: the same stages, so bitwise but for the tied embedding's sum."""
    with Group(8) as one_chunk:
        whole = one_chunk.run("gradients_of", microbatches=microbatches, dropout=0.0, layers=8)
    with Group(**LAYOUTS["PP4xVPP2"]) as group:
        parts = group.run("gradients_of", microbatches=microbatches, own=False, dropout=0.0, layers=8)
    assert [loss.tobytes() for loss in parts[-1]["losses"]] == [loss.tobytes() for loss in whole[-1]["losses"]]
    expected = {name: gradient for part in whole for name, gradient in part["gradients"].items()}
    seen = set()
    for part in parts:
        for name, gradient in part["gradients"].items():
            seen.add(name)
            if "word_embeddings" in name:
                assert abs(expected[name] - gradient).max() <= 1e-6 * abs(expected[name]).max()
            else:
                assert expected[name].tobytes() == gradient.tobytes(), name
    assert seen == set(expected)
