"""The draws are part of the definition of every published figure: these values must never change."""

import json
from random import Random
from statistics import mean, stdev

import pytest

from rrfp.errors import ConfigurationError
from rrfp.simulate.scenarios import CALM, LATE, LEVELS, SCENARIOS, Jitter, check_scenario, draw


@pytest.mark.parametrize("name, first_f, last_b, a_w, late", [
    ("uniform", 1.0, 2.0, 1.0, 0.0),
    ("jitter-0.3", 1.2594700369562948, 1.4132779023967281, 1.513302775704766, 0.0),
    ("mixed", 0.8546289943127371, 3.2090480156583316, 1.2079743006952892, 8.1),
    ("paper-multimodal", 0.05352859087121312, 1.1632519518283604, 2.054128264355088, 13.1),
])
def test_pinned_draws(name, first_f, last_b, a_w, late):
    durations, delays = draw(name, 4, 4, 1.0, 15)
    assert durations["F", 0, 0] == pytest.approx(first_f, rel=1e-12)
    assert durations["B", 3, 3] == pytest.approx(last_b, rel=1e-12)
    assert durations["W", 2, 1] == pytest.approx(a_w, rel=1e-12)
    assert sum(delays.values()) == pytest.approx(late, rel=1e-12)


def test_seeds_and_units():
    assert draw("mixed", 2, 4, 1.0, 1) == draw("mixed", 2, 4, 1.0, 1) != draw("mixed", 2, 4, 1.0, 2)
    one, scaled = draw("mixed", 2, 4, 1.0, 1), draw("mixed", 2, 4, 0.02, 1)
    for ours, theirs in zip(one, scaled, strict=True):
        assert all(theirs[key] == pytest.approx(0.02 * value) for key, value in ours.items())


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_action_and_message_has_a_draw(name):
    durations, delays = draw(name, 3, 5, 1.0, 0)
    assert set(durations) == {(kind, s, m) for kind in "FBIW" for s in range(3) for m in range(5)}
    assert set(delays) == {(kind, s, m) for kind in "FB" for s in range(3) for m in range(5)}
    assert all(value > 0 for value in durations.values()) and all(value >= 0 for value in delays.values())
    assert all(durations["B", s, m] == durations["I", s, m] + durations["W", s, m] for s in range(3) for m in range(5))


def test_names():
    assert len(SCENARIOS) == 15 and (*CALM, *LATE) == SCENARIOS
    with pytest.raises(KeyError):
        draw("sunny", 2, 2, 1.0, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_injected_jitter_upon_even_stages(level):
    """The share of actions delayed and the size of the delays, by the paper's formula; B's delay is I's."""
    probability, base, alpha = LEVELS[level]
    durations, delays = draw(level, 4, 1000, 0.02, 0)
    assert not any(delays.values()) and durations == draw(level, 4, 1000, 0.02, 0)[0]
    assert (durations != draw(level, 4, 1000, 0.02, 1)[0]) == bool(probability)
    extra = {kind: [durations[kind, s, m] - unit for s in range(4) for m in range(1000)] for kind, unit in (("F", .02), ("B", .04), ("I", .02))}
    assert extra["B"] == pytest.approx(extra["I"]) and {durations["W", s, m] for s in range(4) for m in range(1000)} == {0.02}
    for kind in "FB":
        hit = [one for one in extra[kind] if one > 1e-12]
        assert len(hit) / 4000 == pytest.approx(probability, abs=.02)
        # The average of both lies between F's time and B's.
        assert all(.5 * alpha * max(base, .02) <= one + 1e-9 and one <= 1.5 * alpha * max(base, .04) + 1e-9 for one in hit)


def test_jitter_follows_the_average_of_what_was_measured():
    jitter, rng = Jitter("J3"), Random(1)
    level = [jitter.after(0.1, rng) for _ in range(400)]
    later = [jitter.after(1.0, rng) for _ in range(400)]
    assert max(level) <= 1.5 * 1.5 * 0.1 + 1e-9 < max(later) <= 1.5 * 1.5 * 1.0 + 1e-9
    assert min(one for one in (Jitter("J3").after(0.0, Random(seed)) for seed in range(99)) if one) >= 1.5 * 0.015 * 0.5, "at least its base"


def write(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_of_means(tmp_path):
    path = write(tmp_path, {"F": 1, "I": {"mean": [1, 2]}, "W": {"mean": 0.5, "microbatches": [1, 2, 4]}, "delays": {"B": 0.25}})
    durations, delays = draw(path, 2, 3, 0.1, 0)
    assert durations["F", 1, 2] == 0.1 and durations["I", 0, 0] == 0.1 and durations["I", 1, 0] == 0.2
    assert [durations["W", 0, m] for m in range(3)] == [0.05, 0.1, 0.2] and durations["B", 1, 2] == 0.2 + 0.2
    assert delays == {("F", s, m): 0.0 for s in range(2) for m in range(3)} | {("B", s, m): 0.025 for s in range(2) for m in range(3)}


def test_a_file_of_tables_in_seconds(tmp_path):
    path = write(tmp_path, {"unit": 1, "stages": 2, "microbatches": 2, "F": [[1, 2], [3, 4]], "B": [[5, 6], [7, 8]]})
    durations, _ = draw(path, 2, 2, 0.1, 0)
    assert [durations[kind, s, m] for kind in "FB" for s in range(2) for m in range(2)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not any(kind in "IW" for kind, *_ in durations), "a file that gives B alone says nothing of its parts"


def test_a_file_that_varies(tmp_path):
    path = write(tmp_path, {"F": {"mean": 1, "cv": 0.3}, "B": 2, "delays": {"F": {"mean": 10, "probability": 0.05}}})
    (one, late), (other, _) = draw(path, 4, 500, 1.0, 1), draw(path, 4, 500, 1.0, 2)
    assert one == draw(path, 4, 500, 1.0, 1)[0] != other
    forwards = [value for (kind, *_), value in one.items() if kind == "F"]
    assert mean(forwards) == pytest.approx(1, abs=.03) and stdev(forwards) == pytest.approx(.3, abs=.03)
    assert set(late.values()) == {0.0, 10.0} and sum(map(bool, late.values())) / 2000 == pytest.approx(.05, abs=.02)


@pytest.mark.parametrize("content, text", [
    ("{", "cannot be read"), ("[]", "holds no JSON object"), ({"F": 1}, "gives F, and must give F and B, or F, I and W"),
    ({"F": 1, "B": 2, "W": 1}, "gives F B W, and must give"), ({"F": 1, "B": 2, "G": 1}, "does not know G"),
    ({"F": -1, "B": 2}, "F: mean: -1 is not a number of at least 0"), ({"F": {"mean": "x"}, "B": 2}, "'x' is not a number"),
    ({"F": [[1, 2]], "B": 2}, "F: a table has 2 rows (stages) of 3 numbers (microbatches)"),
    ({"F": {"mean": [1, 2, 3]}, "B": 2}, "F: mean has 3 numbers where 2 are needed"), ({"F": {"men": 1}, "B": 2}, "F: does not know men"),
    ({"stages": 4, "F": 1, "B": 2}, "is for 4 stages, not 2"), ({"F": 1, "B": 2, "delays": 3}, "delays: must be an object"),
    ({"F": 0, "B": 0}, "all durations are 0"), ({"unit": 0, "F": 1, "B": 2}, "all durations are 0"),
])
def test_what_a_file_must_not_say(tmp_path, content, text):
    path = write(tmp_path, content)
    with pytest.raises(ConfigurationError, match="docs/scenarios.md shows the format") as caught:
        draw(path, 2, 3, 1.0, 0)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_names_are_checked():
    for name in (*SCENARIOS, *LEVELS):
        check_scenario(name)
    with pytest.raises(ConfigurationError, match="scenario sunny: there is no such scenario; choose one of uniform, .*J3"):
        check_scenario("sunny")
