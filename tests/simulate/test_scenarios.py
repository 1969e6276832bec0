"""The draws are part of the definition of every published figure: these values must never change."""

import pytest

from rrfp.simulate.scenarios import CALM, LATE, SCENARIOS, draw


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
