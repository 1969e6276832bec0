"""The ladder: its factors multiply to its total, whatever was measured, and it says so or fails."""

import random
from math import prod

import pytest

from rrfp.compare.group import Outcome
from rrfp.compare.ladder import Ladder, Step, fixed_orders, ladder, ladder_json, ladder_table, rungs
from rrfp.compare.measure import parse_modes
from rrfp.compare.results import Settings, summarise

PARTS = {"compute": 1, "F": 0, "B": 0, "agreement": 0, "runtime": 0}


def compared(seconds):
    runs = {name: [Outcome(one, [2, 1], [PARTS] * 2) for one in row] for name, row in seconds.items()}
    repeats = len(next(iter(seconds.values())))
    settings = Settings("mixed", 2, 4, 0.02, tuple(range(repeats)))
    return summarise(settings, runs, bounds=[(1.0, 1.0)] * repeats, split=dict.fromkeys(runs, False), predicted={})


def test_factors_multiply_to_the_total(seed):
    rng = random.Random(seed)
    for repeats in (1, 2, 5):
        names = [*rungs(lanes=4), *fixed_orders(2)]
        seconds = {name: [rng.uniform(0.1, 9) for _ in range(repeats)] for name in names}
        found = ladder(rungs(lanes=4), compared(seconds), beside=fixed_orders(2))
        assert prod(step.factor for step in found.steps) == pytest.approx(found.total, rel=1e-12)
        assert found.steps[0].factor == 1.0 and len(found.steps) == 6 and len(found.beside) == 2
        first, last = seconds["megatron-1f1b"], seconds[found.steps[-1].mode]
        assert found.total == pytest.approx(prod(one / other for one, other in zip(first, last, strict=True)) ** (1 / repeats))


def test_a_ladder_whose_product_is_not_the_total_fails():
    steps = (Step("base", "a", 1.0, 2.0, (1,)), Step("more", "b", 1.5, 1.0, (2,)))
    assert Ladder(steps, 1.5).total == 1.5
    with pytest.raises(ValueError, match=r"multiply to 1\.500000, but the total is 1\.600000"):
        Ladder(steps, 1.6)


def test_a_missing_rung_is_refused():
    with pytest.raises(KeyError, match="strict:1f1b:1f1b"):
        ladder(rungs(lanes=4), compared({"megatron-1f1b": [1.0]}))


def test_table_and_json():
    causes = {"megatron-1f1b": "base", "ready:alt:2p": "readiness"}
    seconds = {"megatron-1f1b": [4.0, 9.0], "ready:alt:2p": [2.0, 2.0], "strict:zb-h1:2": [4.0, 4.0]}
    found = ladder(causes, compared(seconds), beside=["strict:zb-h1:2"])
    lines = ladder_table(found, "2 repeats")
    assert lines[-1] == "product of the factors 3.0000 = total 3.0000"
    assert lines[4].split() == ["readiness", "ready:alt:2p", "3.000", "3.000", "2.000", "2", "1"]
    assert lines[5].split() == ["beside", "it", "strict:zb-h1:2", "1.500", "4.000", "2", "1"]
    whole = ladder_json(found)
    assert whole["steps"][1]["factor"] == pytest.approx(3.0) == whole["total"]
    assert whole["beside"][0]["mode"] == "strict:zb-h1:2" and whole["beside"][0]["peak_in_flight"] == [2, 1]


def test_every_rung_is_a_mode_by_its_shortest_name():
    names = [*rungs(lanes=4), *fixed_orders(8)]
    assert list(parse_modes(names, lanes=1)) == names
