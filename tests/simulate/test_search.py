"""The search: it finds what an exhaustive search finds, keeps the memory bound, and isn't taken in by luck."""

import io

import pytest

from rrfp.errors import ConfigurationError
from rrfp.mode import mode_name
from rrfp.simulate import search as module
from rrfp.simulate.costs import Costs, from_scenario
from rrfp.simulate.search import _groups, render, search


def costs(scenario="jitter-0.3", *, seed=0, stages=4, microbatches=8, unit=1.0, chunks=1):
    return from_scenario(scenario, stages=stages, microbatches=microbatches, unit=unit, seed=seed, chunks=chunks)


def exhaustive(draws, memory, **options):
    """Seconds and memory of the best, and how many there are, by trying everything."""
    names = ("total", "hints", "limits", "mode", "split", "lanes", "order")
    defaults = dict.fromkeys(names) | {"mode": "ready", "lanes": 1, "order": "microbatch"} | options
    groups = list(_groups(draws[0], memory, *(defaults[name] for name in names)))
    tried = [module._try(policy, draws, 0.0) for group in groups for policy in group]
    return min(module._rank(each) for each in tried), len(tried)


@pytest.mark.parametrize("scenario", ["uniform", "jitter-0.3", "lengths", "spikes", "paper-multimodal"])
def test_pruning_loses_nothing(scenario, full, seed):
    for number in range(8 if full else 1):
        draws = [costs(scenario, seed=seed + number)]
        found = search(draws[0], memory=8)
        best, count = exhaustive(draws, 8)
        assert module._rank(found[0]) == best
        assert len(found) <= count and all(each.seconds >= each.bound * (1 - 1e-9) for each in found)


def test_pruning_is_what_is_tested(monkeypatch):
    # Negative control: bounds that are too high prune the best away.
    draws = [costs("lengths", seed=3)]
    true = module._bound
    monkeypatch.setattr(module, "_bound", lambda draw, policy, order: true(draw, policy, order) * (1.5 if policy.limit != "8" else 1))
    found = search(draws, memory=8, split=False)
    best, count = exhaustive(draws, 8, split=False)
    assert len(found) < count and module._rank(found[0]) != best


def test_it_spares_work():
    found = search(costs("uniform", microbatches=16), memory=16)
    assert len(found) < exhaustive([costs("uniform", microbatches=16)], 16)[1] / 2


@pytest.mark.parametrize("memory, total", [(3, None), ((6, 4, 3, 2), None), (8, 20)])
def test_the_memory_bound_holds(memory, total):
    allowed = (memory,) * 4 if isinstance(memory, int) else memory
    found = search(costs("lengths"), memory=memory, total=total)
    for each in found:
        assert all(peak <= limit <= bound for peak, limit, bound in zip(each.peaks, each.limits, allowed, strict=True))
        assert total is None or sum(each.limits) <= total
    assert search(costs("lengths"), memory=8)[0].seconds < found[0].seconds


def test_slopes_where_ranks_may_differ():
    draw = costs("jitter-0.3", seed=1, microbatches=16)
    found = search(draw, memory=12, total=28, split=False)
    flat = search(draw, memory=12, total=28, split=False, limits=[str(number) for number in range(1, 8)])
    # As fast with less memory: a slope fits what the ranks need.
    assert found[0].limits == (6, 4, 3, 1) and flat[0].limits == (6, 6, 6, 6) and found[0].seconds == pytest.approx(flat[0].seconds)
    assert not any("-" in each.policy.limit and each.policy.limit != "2p-1" for each in search(draw, memory=7, split=False))


def test_equally_fast_ones_cost_less_memory():
    # With even stages nothing is gained by more than 1F1B's own memory, unsplit.
    found = search(costs("uniform", microbatches=16), memory=8, split=False)
    assert found[0].limits == (4, 3, 2, 1)


def test_split_only_where_weights_are_known():
    given = costs()
    whole = Costs(4, 1, 8, {key: value for key, value in given.durations.items() if key[0] in "FB"}, given.delays)
    assert not any(each.policy.split for each in search(whole, memory=4))
    assert any(each.policy.split for each in search(given, memory=4))
    assert all(each.policy.split for each in search(given, memory=4, split=True))


def test_options_reach_the_policy():
    for each in search(costs("spikes"), memory=8, hints=["alt", "fill-alt"], limits=["2p", "4"], lanes=2, order="free"):
        assert each.policy.lanes == 2 and each.policy.order == "free"
        assert each.policy.hint in ("alt", "fill-alt") and each.policy.limit in ("2p", "4")
    strict = search(costs(), memory=8, mode="strict", hints=["1f1b", "gpipe"], split=False)
    assert {mode_name(each.policy).partition(":")[0] for each in strict} == {"strict"}


def test_several_chunks():
    found = search(costs(stages=8, chunks=2), memory=10, hints=["announced", "1f1b", "alt"], split=False)
    assert found[0].seconds <= min(each.seconds for each in found) and all(max(each.peaks) <= 10 for each in found)


def test_the_median_decides():
    # What is best in one draw and bad in the others must not win.
    draws = [costs("paper-multimodal", seed=seed) for seed in range(5)]
    options = {"memory": 6, "split": False, "limits": ["6"]}
    lucky = [mode_name(search(draw, **options)[0].policy) for draw in draws]
    together = search(draws, **options)
    assert len(set(lucky)) > 1
    assert module._rank(together[0]) == exhaustive(draws, 6, split=False, limits=["6"])[0]


def test_good_enough_is_enough():
    exact, rough = (search(costs("jitter-0.3"), memory=8, within=within) for within in (0.0, 0.5))
    assert len(rough) < len(exact) and rough[0].seconds <= 1.5 * exact[0].seconds


def test_refusals():
    with pytest.raises(ConfigurationError, match="3 3 activations: 2 numbers for 4 ranks; give one for each, or one for all"):
        search(costs(), memory=[3, 3])
    with pytest.raises(ConfigurationError, match="2 activations a rank: no hint runs within that; allow more"):
        search(costs(stages=12, chunks=3), memory=2)
    with pytest.raises(ConfigurationError, match="4 activations a rank and 3 in all: no hint"):
        search(costs(), memory=4, total=3)


def test_the_table_and_the_progress():
    progress = io.StringIO()
    found = search(costs("lengths"), memory=8, progress=progress)
    text = render(found, most=2)
    lines = text.splitlines()
    assert lines[0].split() == ["policy", "seconds", "x", "best", "x", "bound", "peak", "in", "flight", "may", "hold"]
    assert lines[1].split()[0] == mode_name(found[0].policy) and lines[1].split()[2] == "1.000"
    assert lines[-1] == f"and {len(found) - 2} slower ones" and len(lines) == 4
    said = progress.getvalue().splitlines()
    assert said and all(line.startswith("[search] ") and "best so far" in line for line in said)
