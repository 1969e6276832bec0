"""Figures, table and JSON from made-up outcomes."""

import json

import pytest

from rrfp.compare.group import Outcome
from rrfp.compare.results import Settings, as_json, shares, summarise, table

SETTINGS = Settings("mixed", 2, 4, 0.02, (7, 8, 9), cores=2, load=0.5)
KEYS = ["name", "median_s", "q1_s", "q3_s", "ratio", "peak_in_flight", "shares"]


def outcome(seconds, *, compute=0.5, overruns=0, peaks=(2, 1)):
    """Two ranks that compute for the share `compute`, wait for F, and the second of which ends 10% early."""
    first = {"compute": compute, "F": 1 - compute, "B": 0.0, "agreement": 0.0, "runtime": 0.0}
    second = first | {"F": 0.9 - compute}
    parts = [{part: round(share * seconds * 1e9) for part, share in each.items()} for each in (first, second)]
    return Outcome(seconds, list(peaks), parts, overruns)


RUNS = {
    "megatron-1f1b": [outcome(2.0), outcome(3.0), outcome(4.0)],
    "ready:fill-r:2p": [outcome(1.0, compute=0.8, peaks=(3, 1)), outcome(2.0, compute=0.8), outcome(1.0, compute=0.8, peaks=(2, 4))],
}


def compared(runs=RUNS, settings=SETTINGS, *, predicted=None):
    return summarise(settings, runs, bounds=[(1.0, 0.5)] * 3, split={"megatron-1f1b": False, "ready:fill-r:2p": True},
                     predicted={"megatron-1f1b": [2.0, 2.0, 4.0]} if predicted is None else predicted)


def test_ratios_are_medians_of_the_repeats_ratios():
    megatron, ready = compared().rows
    assert (megatron.median, megatron.quartiles, megatron.speedup) == (3.0, (2.5, 3.5), 1.0)
    assert ready.speedup == 2.0, "the ratios are 2, 1.5 and 4; medians would give 3"


def test_every_mode_is_held_to_its_own_bound():
    megatron, ready = compared().rows
    assert (megatron.over_bound, ready.over_bound) == (3.0, 2.0)
    no_bound = summarise(SETTINGS, RUNS, bounds=[(1.0, None)] * 3, split=dict.fromkeys(RUNS, None), predicted={})
    assert no_bound.split_bound is None and [row.over_bound for row in no_bound.rows] == [None, None]
    assert "split backward - s" in "\n".join(table(no_bound))


def test_prediction_and_its_error_only_where_there_is_one():
    megatron, ready = compared().rows
    assert (megatron.predicted, megatron.error) == (2.0, 0.0)
    assert (ready.predicted, ready.error) == (None, None)


def test_peaks_are_the_largest_of_every_stage():
    assert compared().of("ready:fill-r:2p").peaks == (3, 4)


def test_shares_sum_to_the_whole_and_count_ranks_that_ended_early():
    found = shares(RUNS["megatron-1f1b"])
    assert found == {"computing": 500, "blocked_f": 450, "blocked_b": 0, "agreement": 0, "runtime": 0, "ended": 50}
    uneven = [Outcome(1.0, [1], [{"compute": 333_333_333, "F": 333_333_333, "B": 0, "agreement": 0, "runtime": 1}])]
    assert sum(shares(uneven).values()) == 1000


def test_json_has_what_it_promises():
    found = json.loads(json.dumps(as_json(compared())))
    assert [key for key in found if key in ("scenario", "stages", "microbatches", "bound_s", "modes")] == [
        "scenario", "stages", "microbatches", "bound_s", "modes"]
    assert found["seeds"] == [7, 8, 9] and found["split_bound_s"] == 0.5
    for mode in found["modes"]:
        assert list(mode)[: len(KEYS)] == KEYS
        assert sum(mode["shares"].values()) == pytest.approx(100)
    assert found["modes"][1]["ratio"] == 2.0


def test_the_table_says_that_times_are_emulated_and_has_a_row_per_mode():
    text = "\n".join(table(compared()))
    assert "EMULATED" in text and "seeds 7 to 9" in text
    assert "BUSY" not in text and "longer than drawn" not in text
    row = next(line for line in text.splitlines() if line.startswith("ready:fill-r:2p"))
    assert row.split() == "ready:fill-r:2p 1.000 1.000 1.500 2.000 2.000 - - 80.0 15.0 0.0 0.0 0.0 5.0 3 4".split()


@pytest.mark.parametrize(("overruns", "load", "says"), [(1, 0.5, False), (3, 0.5, True), (0, 2.5, False)])
def test_a_busy_machine_is_named(overruns, load, says):
    settings = Settings("mixed", 2, 4, 0.02, (7, 8, 9), cores=2, load=load)
    runs = {"megatron-1f1b": [outcome(2.0, overruns=overruns)] * 3, "ready:fill-r:2p": [outcome(1.0)] * 3}
    text = "\n".join(table(compared(runs, settings)))
    assert ("MACHINE WAS BUSY" in text) is says
    assert ("longer than drawn" in text) is bool(overruns)
    assert ("load 2.5 on 2 cores" in text) is (load > 2)


def test_simulation_says_that_nothing_ran():
    settings = Settings("mixed", 2, 4, 0.02, (7, 8, 9), compute="simulated", cores=2, load=9.0)
    text = "\n".join(table(compared(settings=settings)))
    assert "SIMULATED" in text and "off by" not in text and "BUSY" not in text
