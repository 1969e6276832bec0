"""The strategies that ship: orders equal torch's own, and each is a short plain function."""

import inspect
import warnings

import pytest

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.program import builders
from rrfp.program.builders import BUILDERS, dualpipev, interleaved, one_f_one_b, zb_1, zb_v
from rrfp.program.directives import apply
from rrfp.program.hint_rows import stage_rows
from rrfp.program.traced import sketch
from rrfp.program.training import training_dag
from rrfp.scheduler import lists
from rrfp.scheduler.lists import token


def rows(builder, stages, ranks, microbatches, **options):
    dag = apply(training_dag(sketch(stages, batch=microbatches)), builder(ranks, microbatches, **options))
    return [[token(group) for group in row] for row in stage_rows(dag)]


def torch_rows(name, ranks, microbatches):
    """What torch's schedule of two stages per rank computes for each rank, without making stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining import schedules
    schedule = object.__new__(getattr(schedules, name))
    schedule.pp_group_size, schedule._n_microbatches, schedule._num_stages = ranks, microbatches, 2 * ranks
    schedule.num_stages, schedule.n_local_stages = 2 * ranks, 2
    return [[str(action) for action in schedule._calculate_single_rank_operations(rank) if action is not None] for rank in range(ranks)]


@pytest.mark.parametrize("ranks, microbatches", [(4, 10), (2, 4), (3, 7), (4, 8), (8, 16)])
def test_dualpipev_is_torchs(ranks, microbatches):
    assert rows(dualpipev, 2 * ranks, ranks, microbatches) == torch_rows("ScheduleDualPipeV", ranks, microbatches)


@pytest.mark.parametrize("ranks, microbatches", [(4, 10), (2, 4), (3, 2), (4, 8)])
def test_zb_v_is_torchs(ranks, microbatches):
    assert rows(zb_v, 2 * ranks, ranks, microbatches) == torch_rows("ScheduleZBVZeroBubble", ranks, microbatches)


@pytest.mark.parametrize("ranks, microbatches", [(4, 8), (4, 3), (1, 2)])
def test_one_stage_per_rank_equals_the_schedulers_own_lists(ranks, microbatches):
    placement = Placement.looped(ranks)
    for builder, hint, split in ((one_f_one_b, "1f1b", False), (zb_1, "zb-h1", True)):
        limit = "1f1b" if hint == "1f1b" else str(ranks)
        wanted = Policy(hint=hint, mode="strict", limit=limit, split=split).list_for(placement, microbatches)
        assert rows(builder, ranks, ranks, microbatches) == [[token(group) for group in row] for row in wanted]


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_equals_megatrons(chunks):
    wanted = Policy(hint="1f1b", mode="strict").list_for(Placement.looped(4, chunks), 8)
    assert rows(interleaved, 4 * chunks, 4, 8, chunks=chunks) == [[token(group) for group in row] for row in wanted]


def test_without_overlap_the_order_is_the_same():
    flat = [[str(action) for group in row for action in group]
            for row in stage_rows(apply(training_dag(sketch(8, batch=10)), dualpipev(4, 10)))]
    assert rows(dualpipev, 8, 4, 10, overlap=False) == flat


@pytest.mark.parametrize("name, lines", [("1f1b", 29), ("interleaved", 38), ("dualpipev", 63), ("zb-v", 63), ("zb-1", 38), ("gpipe", 29)])
def test_a_builder_is_a_short_plain_function(name, lines):
    """Together with what only it uses: `_Row` counts for the V-shaped ones."""
    own = len(inspect.getsource(BUILDERS[name]).splitlines())
    shared = len(inspect.getsource(builders._Row).splitlines()) if name in ("zb-v", "dualpipev") else 0
    print(f"{name}: {own} lines, and {shared} of _Row")
    assert own <= lines and own + shared <= 90


def test_what_a_builder_cannot_do_is_refused():
    with pytest.raises(ConfigurationError, match="interleaved: 6 microbatches: must be a multiple of the 4 ranks"):
        interleaved(4, 6)
    with pytest.raises(ConfigurationError, match="dualpipev: 6 microbatches: must be at least twice the 4 ranks"):
        dualpipev(4, 6)


def test_a_program_written_as_a_hint_is_read_back(tmp_path):
    dag = apply(training_dag(sketch(4, batch=8)), interleaved(2, 8))
    lists.write(stage_rows(dag), tmp_path / "program.csv")
    policy = Policy(hint=str(tmp_path / "program.csv"), mode="strict")
    assert policy.list_for(Placement.looped(2, 2), 8) == stage_rows(dag)
