"""What test_cpu.py checks inside one process in CPU mode. `cpu_checks.py FOLDER` runs all and writes FOLDER/results.json."""

import json
import os
import sys
import time
import traceback
import types
import warnings
from pathlib import Path

FOLDER = Path(sys.argv[1])
ROOT = Path(__file__).resolve().parents[2]
CHECKS = {}

warnings.filterwarnings("ignore", message=".*(not installed|torch_jit|deprecated).*")
os.environ["LOCAL_WORLD_SIZE"] = "3"  # what torchrun sets: the number of devices that are reported

import torch  # noqa: E402

from rrfp.errors import ConfigurationError  # noqa: E402
from rrfp.megatron import cpu  # noqa: E402

cpu.enable()
cpu.patch_megatron()


def check(function):
    CHECKS[function.__name__] = function
    return function


def refused(call, *words) -> bool:
    try:
        call()
    except ConfigurationError as error:
        return all(word in str(error) for word in words)
    return False


def called_from(module: str, expression: str, **names):
    """The value of an expression as code of `module` would see it."""
    return eval(expression, {"__name__": module, "torch": torch, **names})


@check
def devices():
    for device in ("cuda", "cuda:1", 0, torch.device("cuda", 2), torch.cuda.current_device()):
        for tensor in (
            torch.zeros(2, device=device), torch.ones(2).to(device), torch.ones(2).new_empty(3, device=device),
            torch.ones(2).to(device, torch.float64), torch.tensor([1], device=device), torch.zeros(1).cuda(device),
        ):  # fmt: skip
            assert tensor.device.type == "cpu", (device, tensor.device)
    module = torch.nn.Linear(2, 2).cuda().to("cuda")
    assert module.weight.device.type == "cpu"
    assert torch.empty(2, pin_memory=True).shape == (2,)
    torch.save({"a": torch.ones(1)}, FOLDER / "saved.pt")
    assert torch.load(FOLDER / "saved.pt", map_location="cuda:1")["a"].device.type == "cpu"
    # control: every other device is left as it is
    assert torch.empty(1, device="meta").is_meta and torch.nn.Linear(1, 1).to("meta").weight.is_meta
    assert torch.ones(2).to(torch.float64).dtype is torch.float64


@check
def presence():
    assert torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.device_count() == 3
    assert called_from("megatron.core.utils", "torch.cuda.is_available()")
    # control: torch hears the truth, or its optimizers would look for a stream
    assert not called_from("torch.optim.adam", "torch.cuda.is_available()")
    assert not torch.accelerator.is_available()
    assert called_from("torchvision", "torch.cuda.is_available()")  # a name that only begins alike
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.Adam([weight], lr=0.1).step()
    assert weight[0] < 1


@check
def tensor_types():
    tensor = torch.ones(1, dtype=torch.bfloat16)
    assert called_from("megatron.core.optimizer.optimizer", "t.type()", t=tensor) == "torch.cuda.BFloat16Tensor"
    assert tensor.type() == "torch.BFloat16Tensor"  # control: everybody else hears the truth
    assert tensor.type("torch.cuda.FloatTensor").dtype is torch.float32 and tensor.type(torch.float16).dtype is torch.float16


@check
def streams_events_memory():
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start.record()
        while time.perf_counter() - start._time < 0.002:
            pass
        end.record(stream)
        stream.wait_event(end)
        torch.cuda.current_stream().wait_stream(stream)
    assert stream.query() and 2 <= start.elapsed_time(end) < 1000  # milliseconds
    assert torch.cuda.memory_allocated() > 50 << 20 <= torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0 == torch.cuda.memory_stats()["num_ooms"]
    assert refused(torch.cuda.CUDAGraph, "CUDA graphs", "--cuda-graph-impl")


@check
def compilation():
    def function():
        pass

    assert torch.compile(function) is function and torch.compile(dynamic=True)(function) is function
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()  # torch._dynamo demands one function per name of torch: a stand-in used twice fails here


@check
def data_loaders_leave_dropout_alone():
    dataset = torch.utils.data.TensorDataset(torch.arange(4))
    before = torch.get_rng_state()
    assert len(list(torch.utils.data.DataLoader(dataset))) == 4
    assert torch.equal(before, torch.get_rng_state())
    list(torch.utils.data.DataLoader(dataset, generator=torch.default_generator))  # control: this is what a loader does by itself
    assert not torch.equal(before, torch.get_rng_state())


@check
def process_groups():
    dist = torch.distributed
    group = dist.new_group([0], backend="nccl")
    assert dist.get_backend(group) == dist.get_backend() == "gloo"
    dist.barrier(group, device_ids=[0])
    out = torch.empty(2)
    dist.all_to_all_single(out, torch.tensor([1.0, 2.0]), torch.tensor([2]), torch.tensor([2]))
    assert out.tolist() == [1.0, 2.0]


@check
def tracker_governs_dropout():
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    tracker, drop, x = tensor_parallel.get_cuda_rng_tracker(), torch.nn.functional.dropout, torch.ones(64)
    states = tracker.get_states()
    with tracker.fork():
        first, second = drop(x), drop(x)
    tracker.set_states(states)
    outside = drop(x)  # draws from another stream, which the tracker's must not notice
    with tracker.fork():
        assert torch.equal(drop(x), first) and torch.equal(drop(x), second)
    assert not torch.equal(first, second) and not torch.equal(outside, first)


@check
def recomputation_replays_dropout():
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    tensor_parallel.model_parallel_cuda_manual_seed(2)
    tracker = tensor_parallel.get_cuda_rng_tracker()

    def block(x):
        with tracker.fork():
            x = torch.nn.functional.dropout(x * x)
        return torch.nn.functional.dropout(x)

    def gradient(recompute):
        torch.cuda.manual_seed(3)
        tracker.set_states(dict(states))
        x = torch.full((256,), 2.0, requires_grad=True)
        y = tensor_parallel.checkpoint(block, False, x) if recompute else block(x)
        torch.nn.functional.dropout(x)  # something is drawn between forward and backward
        y.sum().backward()
        return x.grad

    states = tracker.get_states()
    expected = gradient(False)
    assert torch.equal(gradient(True), expected)
    restore, random._set_all_rng_states = random._set_all_rng_states, lambda *args: None
    try:  # control: states that are not restored give other gradients
        assert not torch.equal(gradient(True), expected)
    finally:
        random._set_all_rng_states = restore


@check
def dynamic_loss_scale_skips():
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 2, 1)
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([weight], lr=0.5), OptimizerConfig(fp16=True, clip_grad=0.0), scaler, lambda *args: None
    )
    optimizer.grad_stats_parallel_group = None

    def step(value):
        weight.main_grad = torch.full((4,), value)
        return optimizer.step()[0]

    assert step(float("inf")) is False and scaler.scale.item() == 512.0 and weight.tolist() == [1.0] * 4  # skipped
    assert step(512.0) is True and weight.tolist() == [0.5] * 4  # control: a finite step is taken, unscaled
    assert step(0.0) is True and scaler.scale.item() == 1024.0


@check
def norm_under_sequence_parallelism():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert not any(p.sequence_parallel for p in WrappedTorchNorm(config=config, hidden_size=8).parameters())  # control
    config.sequence_parallel = True
    assert all(p.sequence_parallel for p in WrappedTorchNorm(config=config, hidden_size=8).parameters())
    assert config.sequence_parallel


@check
def outputs_kept_while_gloo_sends():
    import megatron.core
    from megatron.core.model_parallel_config import ModelParallelConfig

    def deallocates():
        config = ModelParallelConfig(
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=True,
        )  # fmt: skip
        return config.deallocate_pipeline_outputs

    own, version = ModelParallelConfig.__post_init__, megatron.core.__version__
    try:
        for known, kept in (("0.18.2", False), ("0.17.1", True)):  # 0.18 waits for its sends: the control
            ModelParallelConfig.__post_init__ = vars(own).get("__wrapped__", own)
            megatron.core.__version__ = known
            cpu._keep_outputs_while_gloo_sends()
            assert deallocates() is not kept, known
    finally:
        ModelParallelConfig.__post_init__, megatron.core.__version__ = own, version


@check
def saved_tensors_are_copies():
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    tensor = torch.zeros(2, requires_grad=True)
    buckets = [("file", "key", (["bytes"], [("item", tensor)]))]
    ((name, key, (data, ((item, copy),))),) = FileSystemWriterAsync.preload_tensors(buckets)
    assert (name, key, data, item) == ("file", "key", ["bytes"], "item")
    with torch.no_grad():
        shared = tensor.detach().to("cpu", non_blocking=True)  # control: what Megatron does copies nothing here
        tensor += 1
    assert copy.tolist() == [0, 0] and shared.tolist() == [1, 1] and not copy.requires_grad


@check
def text_dataset():
    sys.path.insert(0, str(ROOT / "scripts"))
    import prepare_data

    argv, sys.argv = sys.argv, ["prepare_data.py", str(FOLDER / "data")]
    try:
        prepare_data.main()
        written = (FOLDER / "data/text.bin").stat().st_mtime_ns
        prepare_data.main()  # again is harmless
        assert (FOLDER / "data/text.bin").stat().st_mtime_ns == written
    finally:
        sys.argv = argv
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from pydoc_data.topics import topics

    dataset, names = IndexedDataset(str(FOLDER / "data/text")), sorted(topics)
    assert len(dataset) == len(names)
    for index in (0, len(names) - 1):
        *text, end = dataset[index].tolist()
        assert bytes(text).decode() == topics[names[index]] and end == prepare_data.END_OF_DOCUMENT
    options = (FOLDER / "data/text.args").read_text().split()
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = types.SimpleNamespace(
        tokenizer_type="NullTokenizer", vocab_size=int(options[options.index("--vocab-size") + 1]), pad_vocab_size=False,
        padded_vocab_size=256, rank=1, make_vocab_size_divisible_by=1, tensor_model_parallel_size=1,
    )  # fmt: skip
    tokenizer = build_tokenizer(args)
    assert tokenizer.eod == prepare_data.END_OF_DOCUMENT and tokenizer.vocab_size == 256


def main():
    torch.distributed.init_process_group("nccl", init_method=f"file://{FOLDER}/store", rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    results = {}
    for name, function in CHECKS.items():
        try:
            function()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    (FOLDER / "results.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
