"""Emulated durations and injected jitter: drawn per action from the seed, whatever order the actions run in."""

import random
import statistics

import pytest

from rrfp.action import Action, Edge
from rrfp.megatron import padding
from rrfp.megatron.padding import LEVELS, Emulation, Injection, parse_scenario
from rrfp.simulate.scenarios import SCENARIOS, draw

STAGES, MICROBATCHES = 4, 6


class Clock:
    """Stands in for `time`: sleeping moves it, and so does `work`."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(padding, "time", clock)
    return clock


def run(one, clock, call: int, actions, *, work: float = 0.001) -> dict[Action, float]:
    """What each action of a call took, if its own work takes `work` seconds."""
    one.begin(call, MICROBATCHES)
    took = {}
    for action in actions:
        start = clock.now
        one.start()
        clock.now += work
        padded = one.finish(call, action)
        took[action] = clock.now - start
        assert padded == pytest.approx(took[action] - work)
    return took


ACTIONS = [Action(kind, stage, microbatch) for stage in range(STAGES) for kind in "FB" for microbatch in range(MICROBATCHES)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_emulated_action_lasts_as_long_as_its_scenario_says(clock, name):
    emulation = Emulation(f"{name}:50:3", stages=STAGES)
    for call in (0, 1):
        took = run(emulation, clock, call, ACTIONS)
        durations, delays = draw(name, STAGES, MICROBATCHES, 0.050, 3 + call)
        for action, seconds in took.items():
            assert seconds == pytest.approx(durations[action.kind, action.stage, action.microbatch])
        for microbatch in range(MICROBATCHES):
            for stage in range(1, STAGES):
                assert emulation.delay(Edge(stage - 1, stage), microbatch) == delays["F", stage, microbatch]
                assert emulation.delay(Edge(stage, stage - 1), microbatch) == delays["B", stage - 1, microbatch]
        assert emulation.delays_messages == any(delays.values())
    assert emulation.overruns == 0 and emulation.actions == 2 * len(ACTIONS)


@pytest.mark.parametrize(
    "make", [lambda: Emulation("images-tokens:20:5", stages=STAGES), lambda: Injection("J2", seed=5)], ids=["emulate", "inject"]
)
def test_draws_do_not_depend_on_the_order(clock, make, seed):
    """Injected delays scale with the stage's average, so here every action's own work is the same."""
    shuffled = random.Random(seed).sample(ACTIONS, len(ACTIONS))
    plain, other = run(make(), clock, 0, ACTIONS), run(make(), clock, 0, shuffled)
    assert plain == pytest.approx(other)
    assert run(make(), clock, 1, ACTIONS) != pytest.approx(plain)  # control: another call draws anew


def test_what_takes_longer_than_drawn_is_counted(clock):
    emulation = Emulation("uniform:10", stages=STAGES)
    took = run(emulation, clock, 0, ACTIONS, work=0.015)
    assert {action.kind: round(seconds, 6) for action, seconds in took.items()} == {"F": 0.015, "B": 0.020}
    assert emulation.overruns == len(ACTIONS) // 2 and emulation.worst_overrun == pytest.approx(0.005)
    assert emulation.summary() == (
        "emulated durations: scenario uniform, forward 10 ms on average; 24 of 48 actions took longer than drawn "
        "(worst by 5.0 ms)"
    )


def test_a_call_with_another_number_of_microbatches_draws_for_it(clock):
    emulation = Emulation("lengths:20:1", stages=2)
    emulation.begin(0, 2)
    emulation.begin(0, 8)
    emulation.start()
    assert emulation.finish(0, Action("B", 1, 7)) > 0


def test_scenario_text():
    assert parse_scenario("images") == ("images", 0.020, 0)
    assert parse_scenario("images:30") == ("images", 0.030, 0)
    assert parse_scenario("images:2.5:7") == ("images", 0.0025, 7)


@pytest.mark.parametrize("level", LEVELS)
def test_jitter_is_the_papers(clock, level):
    """Probability p, base B and factor alpha as in the paper's table: a delay is alpha x max(B, e) x (.5 + U(0, 1))."""
    probability, base, factor = {"J0": (0, 0, 0), "J1": (0.1, 0.005, 0.5), "J2": (0.2, 0.010, 1), "J3": (0.3, 0.015, 1.5)}[
        level
    ]
    actions = [Action("F", 0, microbatch) for microbatch in range(4000)]
    for work in (0.001, 0.1):
        injection = Injection(level, seed=1)
        delays = [seconds - work for seconds in run(injection, clock, 0, actions, work=work).values()]
        hit = [delay for delay in delays if delay > 1e-9]
        assert len(hit) == injection.injected
        assert len(hit) / len(actions) == pytest.approx(probability, abs=0.02)
        if level == "J0":
            assert not hit
            continue
        scale = factor * max(base, work)
        assert 0.5 * scale <= min(hit) + 1e-9 and max(hit) <= 1.5 * scale + 1e-9
        assert statistics.mean(hit) == pytest.approx(scale, rel=0.05)


def test_the_average_follows_the_work(clock):
    """e = .9 e + .1 c; before any other, e = c. With work far above the base, delays show it."""
    injection = Injection("J3", seed=2)
    expected, seen = None, 0
    for microbatch, work in enumerate(random.Random(3).choices([0.05, 0.2], k=300)):
        expected = work if expected is None else 0.9 * expected + 0.1 * work
        injection.start()
        clock.now += work
        if pause := injection.finish(0, Action("B", 1, microbatch)):
            seen += 1
            assert 0.5 * 1.5 * expected <= pause + 1e-9 and pause <= 1.5 * 1.5 * expected + 1e-9
    assert seen > 50 and injection.summary() == f"injected jitter J3: {seen} of 300 actions were delayed"


def test_seeds_differ(clock):
    assert run(Injection("J3", seed=1), clock, 0, ACTIONS) != pytest.approx(run(Injection("J3", seed=2), clock, 0, ACTIONS))
    assert run(Emulation("links:20:1", stages=STAGES), clock, 0, ACTIONS) != pytest.approx(
        run(Emulation("links:20:2", stages=STAGES), clock, 0, ACTIONS)
    )
