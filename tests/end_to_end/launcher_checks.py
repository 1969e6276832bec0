"""`rrfp.install` as users without Megatron's arguments call it, on two bare processes. The first check that fails ends it."""

import gc
import threading

import rrfp.megatron as plugin
from rrfp.megatron import cpu

cpu.enable(device_count=2)

import torch  # noqa: E402
from megatron.core import ModelParallelConfig, parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402

OWN = schedules.forward_backward_pipelining_without_interleaving
OWN_INTERLEAVED = schedules.forward_backward_pipelining_with_interleaving
INITIALIZE = parallel_state.initialize_model_parallel


def calls_of_engine() -> int:
    from rrfp.megatron import runtime

    return sum(one.engine.call + 1 for one in runtime._runtimes.values())


def train() -> list:
    """One iteration of a linear layer per stage, by whatever schedule Megatron returns."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(8, 8)
    layer.config = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float)
    layer.config.hidden_size = 8
    layer.model_type = ModelType.encoder_or_decoder
    layer.set_input_tensor = lambda tensors: setattr(layer, "input", tensors[0])

    def forward(iterator, model):
        output = model(model.input if model.input is not None else torch.full((4, 2, 8), float(next(iterator))))
        return output, lambda out: (out.sum(), {"sum": out.sum().detach()})

    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(range(100)),
        model=[layer],
        num_microbatches=3,
        seq_length=4,
        micro_batch_size=2,
    )
    return [loss["sum"].item() for loss in losses] + [layer.weight.grad.sum().item()]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rrfp")]


def uninstalled() -> None:
    """Megatron as it was, and nothing of ours left running."""
    assert schedules.forward_backward_pipelining_without_interleaving is OWN
    assert schedules.forward_backward_pipelining_with_interleaving is OWN_INTERLEAVED
    assert parallel_state.initialize_model_parallel is INITIALIZE
    gc.collect()
    assert not threads(), threads()


def main() -> None:
    torch.distributed.init_process_group("gloo")

    # Before the model's process groups exist.
    plugin.install(cpu=True, timeout=30.0)
    ours = schedules.forward_backward_pipelining_without_interleaving
    assert ours is not OWN and calls_of_engine() == 0 and not threads()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    assert threads(), "connected with the groups"
    assert get_forward_backward_func() is ours
    results = [train()]
    assert calls_of_engine() == 1

    # Again with the same options: nothing happens. With others: they count.
    plugin.install(cpu=True, timeout=30.0)
    assert schedules.forward_backward_pipelining_without_interleaving is ours
    results.append(train())
    assert calls_of_engine() == 2
    plugin.install(timeout=30.0, limit="eager", hint="bf")
    assert schedules.forward_backward_pipelining_without_interleaving not in (ours, OWN)
    results.append(train())
    assert calls_of_engine() == 1, "a runtime of its own"

    plugin.uninstall()
    uninstalled()
    results.append(train())
    assert calls_of_engine() == 0
    plugin.uninstall()
    uninstalled()

    # Megatron's own schedule is left in place, the very object.
    plugin.install(schedule="1f1b")
    uninstalled()

    # After the groups exist.
    plugin.install(mode="strict", hint="1f1b")
    assert threads()
    results.append(train())
    assert calls_of_engine() == 1
    plugin.uninstall()
    uninstalled()
    assert all(result == results[0] for result in results), results
    assert len(results[0]) == (1 if parallel_state.is_pipeline_first_stage() else 4)

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print("all checks passed")


if __name__ == "__main__":
    main()
