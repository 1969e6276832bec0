"""What every test may use: the switch between reduced and full counts, and a seed that is always printed."""

import os
import random

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # what is slow is the machine
settings.load_profile("untimed")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads; child processes inherit it


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="full counts: every seed, size and version, not the reduced default")
    parser.addoption("--deep", action="store_true", help="beyond --all, for as long as it takes: the largest model checks")
    parser.addoption("--seed", type=int, default=None, help="seed of the randomised tests (printed in any case)")


def pytest_report_header(config):
    if config.getoption("--deep"):
        return "counts: deep (--deep)"
    return f"counts: {'full (--all)' if config.getoption('--all') else 'reduced (pytest --all for the full ones)'}"


@pytest.fixture(scope="session")
def full(request) -> bool:
    """True under `--all`: run the full counts."""
    return request.config.getoption("--all") or request.config.getoption("--deep")


@pytest.fixture(scope="session")
def deep(request) -> bool:
    """True under `--deep`: run what takes longer than the full counts may."""
    return request.config.getoption("--deep")


@pytest.fixture
def seed(request) -> int:
    """A seed for one randomised test; printed, so that a failure shows it and `--seed N` repeats it."""
    given = request.config.getoption("--seed")
    value = random.randrange(2**31) if given is None else given
    print(f"seed {value} (repeat with --seed {value})")
    return value
