"""Lists for another placement of chunks than Megatron's, as the drop-in refuses them when a job starts."""

import argparse
import re

import pytest

from rrfp.errors import ConfigurationError
from rrfp.megatron import _check_at_start
from rrfp.megatron.options import Options
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import chain
from rrfp.scheduler.hints import Prefer
from rrfp.scheduler.lists import as_row, write
from rrfp.simulate.clock import drive

MICROBATCHES = 8


def file_for(placement, folder, *, split=False) -> str:
    """A list that runs on this placement."""
    schedulers = [Scheduler(chain(placement, rank, MICROBATCHES, split=split), Prefer("BF"), limit=2 * placement.ranks)
                  for rank in range(placement.ranks)]
    path = folder / "list.csv"
    write([as_row(row) for row in drive(schedulers, lambda action: 1.0).rows], path)
    return str(path)


def start(hint, *, chunks=2, mode="ready"):
    """What a job of two pipeline ranks checks of its hint before it starts."""
    args = argparse.Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks, data_parallel_size=1,
                              global_batch_size=MICROBATCHES, micro_batch_size=1)
    _check_at_start(Options(hint=hint, mode=mode, limit=str(2 * MICROBATCHES)), args)


@pytest.mark.parametrize("mode", ["ready", "strict"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("chunks, here", [(2, "this run has it on rank 0"), (None, "this run has 2 stages")], ids=["two", "one"])
def test_a_v_is_refused_by_name(tmp_path, chunks, here, split, mode):
    hint = file_for(Placement.v(2), tmp_path, split=split)
    with pytest.raises(ConfigurationError) as refused:
        start(hint, chunks=chunks, mode=mode)
    assert re.fullmatch(
        rf"--rrfp-hint {re.escape(hint)}: is a list with a V placement \(as of ZB-V, DualPipeV\): stage 2 on rank 1, {here}; "
        r"use a list for this run's placement, for example --rrfp-hint 1f1b, or a rule, for example --rrfp-hint announced", str(refused.value))


@pytest.mark.parametrize("mode", ["ready", "strict"])
def test_the_way_out_is_one(tmp_path, mode):
    """Control: the hints that the refusal names, and a list for Megatron's placement, are taken."""
    for hint in ("1f1b", "announced", file_for(Placement.looped(2, 2), tmp_path)):
        start(hint, mode=mode)


def test_a_v_runs_on_a_v(tmp_path):
    """Control: it is the placement that is refused, not the list."""
    hint = file_for(Placement.v(2), tmp_path)
    for rank in range(2):
        Policy(hint=hint, limit="2p").scheduler(Placement.v(2), rank, MICROBATCHES)


def test_a_list_that_is_misplaced_otherwise_is_named_by_its_first_action(tmp_path):
    hint = file_for(Placement.of((0, 1, 0, 1)), tmp_path)
    with open(hint) as file:
        first, second = file
    (tmp_path / "swapped.csv").write_text(second + first)
    with pytest.raises(ConfigurationError, match="rank 0, position 0: 1F0 belongs to rank 1; remove it"):
        start(str(tmp_path / "swapped.csv"))
