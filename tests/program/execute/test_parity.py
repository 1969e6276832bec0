"""Every strategy that ships, with every parallelism, on real processes: losses, every gradient and parameters equal one process' (float32, 1e-6).

Each case trains on other data in every step, three steps in each mode, under random delays of actions, collectives and messages; after
one step each gradient is compared, after the next each parameter (`jobs.Shown`).
"""

import pytest

from rrfp.program.builders import BUILDERS
from tests.program.execute.compare import worst

pytestmark = pytest.mark.timeout(240)
MICROBATCHES = 4
PARALLEL = {
    "pp": {}, "dp": {"replicas": 2}, "zero1": {"replicas": 2, "zero": 1}, "zero2": {"replicas": 2, "zero": 2}, "zero3": {"replicas": 2, "zero": 3},
    "ep": {"replicas": 2, "experts": True}, "ep-zero2": {"replicas": 2, "zero": 2, "experts": True},
    "ep-zero3": {"replicas": 2, "zero": 3, "experts": True},
}  # fmt: skip
MODES = ["strict", "ready", "ready", "strict", "strict", "ready"]
TOLERANCE = 1e-6


def stages_of(name, ranks):
    return 2 * ranks if name in ("interleaved", "zb-v", "dualpipev") else ranks


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_with_every_parallelism(groups, name, parallel, seed, full):
    options = PARALLEL[parallel]
    replicas = options.get("replicas", 1)
    which = ("gpt", stages_of(name, 2), options.get("experts", False), False)
    directives = BUILDERS[name](2, MICROBATCHES, **options)
    one = ("momentum", "adam")[(list(PARALLEL).index(parallel) + list(BUILDERS).index(name)) % 2]
    for optimizer in ("momentum", "adam") if full else (one,):
        for delays in range(seed, seed + (3 if full else 1)):
            found, _ = worst(groups(2 * replicas), which, directives, replicas=replicas, pieces=MICROBATCHES * replicas, optimizer=optimizer,
                             modes=MODES, seed=delays)
            assert found < TOLERANCE, f"{name} {parallel} {optimizer}: differs by {found}"


@pytest.mark.parametrize("name", ["1f1b", "zb-1"])
def test_where_the_order_is_kept_every_bit_is(groups, name, seed):
    """Without replicas gradients are summed in the order of the row: a strict one gives one process' bits."""
    found, _ = worst(groups(2), ("gpt", 2, False, False), BUILDERS[name](2, MICROBATCHES), replicas=1, pieces=MICROBATCHES, optimizer="adam",
                     modes=["strict"] * 4, seed=seed)
    assert found == 0


@pytest.mark.parametrize("parallel", ["zero1", "zero2", "zero3", "ep"])
@pytest.mark.parametrize("name, tied, frozen", [("zb-1", True, True), ("1f1b", False, True)])
def test_tied_and_frozen_parameters(groups, name, parallel, tied, frozen, seed):
    options = PARALLEL[parallel]
    which = ("gpt", 2, options.get("experts", False), tied, frozen)
    found, _ = worst(groups(4), which, BUILDERS[name](2, MICROBATCHES, **options), replicas=2, pieces=2 * MICROBATCHES, optimizer="momentum",
                     modes=MODES[:4], seed=seed)
    assert found < TOLERANCE


@pytest.mark.parametrize("wrong, options", [
    ("gradient", {}), ("reduction", {"replicas": 2}), ("scatter", {"replicas": 2, "zero": 2}), ("exchange", {"replicas": 2, "experts": True}),
])  # fmt: skip
def test_numbers_differ_where_something_is_broken(groups, wrong, options):
    """Negative control: the proof above sees it when one gradient is a thousandth too large, a reduction is left out, or tokens stay where they
    are."""
    which = ("gpt", 2, options.get("experts", False), False)
    directives = BUILDERS["1f1b"](2, MICROBATCHES, **options)
    replicas = options.get("replicas", 1)
    found, _ = worst(groups(2 * replicas), which, directives, replicas=replicas, pieces=replicas * MICROBATCHES, modes=["strict"] * 2, wrong=wrong)
    assert found > (1e-5 if wrong == "gradient" else 1e-4)
