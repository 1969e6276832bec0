"""PyTorch's own schedule objects, without processes or models: the other side of the tests of published lists and of their notation."""

from types import SimpleNamespace

from torch.distributed.pipelining import schedules

from rrfp.scheduler.lists import PUBLISHED


def torch_schedule(name, ranks, chunks, microbatches):
    """The schedule as PyTorch builds it, lowering for its runtime included."""
    return getattr(schedules, PUBLISHED[name].torch_class)(_stages(ranks, chunks), microbatches)


def torch_single(name, ranks, microbatches):
    """Rank -> tokens of a one-chunk schedule, without idle steps and without what the lowering adds."""
    [stage] = _stages(ranks, 1)
    stage = SimpleNamespace(**vars(stage), is_first=False, is_last=False, group=None, stage_index=0, has_backward=True, device="cpu")
    order = getattr(schedules, name)(stage, microbatches)._get_pipeline_order()
    return {rank: [str(a) for a in row if a is not None and "REDUCE" not in str(a)] for rank, row in order.items()}


def torch_reads(path, ranks, chunks, microbatches):
    """What PyTorch makes of a CSV file: rank -> actions. It raises where it would not run it."""
    runtime = schedules._PipelineScheduleRuntime(_stages(ranks, chunks), microbatches)
    runtime._load_csv(str(path))
    return runtime.pipeline_order


def _stages(ranks, chunks):
    return [SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=None) for _ in range(chunks)]
