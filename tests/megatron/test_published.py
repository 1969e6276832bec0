"""Published lists in the drop-in: losses, every gradient and the weights are bitwise Megatron's own, strict and ready, under random delays."""

import pytest
from group import Group

from rrfp.program.builders import interleaved, one_f_one_b
from rrfp.program.files import write_program

MICROBATCHES = 4
LAYOUTS = {"PP2": {}, "PP2xVPP2": {"virtual_pipeline_model_parallel_size": 2}}
HINTS = {"PP2": ["gpipe", "looped-bfs", "interleaved-1f1b"], "PP2xVPP2": ["gpipe", "looped-bfs", "interleaved-1f1b"]}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    with Group(2, **LAYOUTS[request.param]) as group:
        yield request.param, group


def trained(group, hint, mode, seeds, **options):
    """As the fixed list asks for it: room for every activation. Several chunks share a generator, so no dropout."""
    options = {"hint": hint, "mode": mode, "limit": str(2 * MICROBATCHES), **options}
    return group.run("same", microbatches=MICROBATCHES, seeds=seeds, steps=2, options=options, dropout=0.0, deadline=300)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["strict", "ready"])
def test_bitwise_equal_under_random_delays(layout, mode, full):
    name, group = layout
    for hint in HINTS[name]:
        assert trained(group, hint, mode, list(range(20 if full else 1))) == [None, None], (name, hint)


def test_another_order_of_microbatches_is_seen(layout):
    """Negative control: looped BFS as published goes back through the microbatches, which rounds otherwise, and free order lets it."""
    name, group = layout
    assert any(trained(group, "looped-bfs", "strict", [1], order="free")), name


@pytest.mark.timeout(600)
def test_a_programs_order_trains_bitwise_equal(layout, tmp_path):
    """`--rrfp-hint FILE` of a program, an outline or one whose model is Python that is not there: it is not run."""
    name, group = layout
    strategy = one_f_one_b if name == "PP2" else interleaved
    write_program(tmp_path / "p.json", strategy(2, MICROBATCHES), {"python": "nowhere.py:make"})
    for mode in ("strict", "ready"):
        assert trained(group, str(tmp_path / "p.json"), mode, [1]) == [None, None], name
