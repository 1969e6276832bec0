"""One rank of one part of scripts/gpu_check.py: PART FOLDER STORE GPUS ITERATIONS. Writes FOLDER/rank<r>.json."""

import json
import os
import random
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PART, FOLDER, STORE, GPUS, ITERATIONS = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
REHEARSAL = GPUS == 0
if REHEARSAL:
    from rrfp.megatron import cpu

    cpu.enable()
    cpu.patch_megatron()
    torch.set_num_threads(1)
else:
    torch.cuda.set_device(RANK % GPUS)
NCCL_WORLD = RANKS <= GPUS  # NCCL refuses two ranks on one GPU: then gloo, and Megatron's messages by way of the host

import gpu_check_model as gpt  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from rrfp.megatron import runtime as runtimes  # noqa: E402
from rrfp.megatron.forward_backward import make_forward_backward  # noqa: E402
from rrfp.megatron.options import Options  # noqa: E402

OWN = schedules.forward_backward_pipelining_without_interleaving
PATHS = ["host"] if REHEARSAL else ["auto", "host"]


def start(pipeline: int = RANKS) -> None:
    torch.distributed.init_process_group("nccl" if NCCL_WORLD else "gloo", init_method=Path(STORE).resolve().as_uri(), rank=RANK, world_size=RANKS)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline)
    if not NCCL_WORLD:
        gpt.stage_messages_through_the_host()
    if REHEARSAL:
        sys.path.insert(0, str(ROOT / "tests/fakes"))
        from fake_cuda import FakeDevice, Machine

        device = FakeDevice(Machine(seed=1).start())
        runtimes.find_device = lambda options: device


def schedule(**options):
    return make_forward_backward(Options(timeout=60.0, **options), original=OWN)


class Delays:
    """Random delays on the device, differently on each rank. A `Padding`."""

    longest = 0.0

    def begin(self, call, microbatches): ...

    def on_device(self, call, action, took):
        dice = random.Random(f"{RANK}/{call}/{action}")
        return self.longest * dice.random() if dice.random() < 0.3 else 0.0

    def summary(self):
        return "random delays on the device"


# ------------------------------------------------------------------ the parts: each returns (verdict, details)
def memory():
    """Two processes: copies and events of this device, and the other's memory if it can be opened."""
    from rrfp.action import Edge
    from rrfp.comm.paths import probe

    torch.distributed.init_process_group("gloo", init_method=Path(STORE).resolve().as_uri(), rank=RANK, world_size=RANKS)
    if REHEARSAL:
        return "ok", "nothing to try without a GPU"
    from rrfp.comm.cuda import CudaDevice

    device = CudaDevice()
    size = 64 << 20
    here, there, stream = device.allocate(size), device.allocate(size), device.stream()
    staging = device.pinned(size)
    rates = {}
    for name, to, source in (("on the GPU", there, here), ("to the host", staging, here), ("from the host", here, staging)):
        device.copy(to, source, stream)
        begin = device.record(stream)
        for _ in range(8):
            device.copy(to, source, stream)
        end = device.record(stream)
        device.synchronize(end)
        rates[name] = 8 * size / device.seconds(begin, end) / 1e9
    waits = []
    for _ in range(50):
        event = device.record(stream)
        begin = time.perf_counter()
        device.synchronize(event)
        waits.append(time.perf_counter() - begin)
    start_, asked = device.record(stream), 0.02
    device.delay(asked, stream)
    end = device.record(stream)
    device.synchronize(end)
    got = device.seconds(start_, end)
    edges = [Edge(a, b) for a in range(RANKS) for b in (a - 1, a + 1) if 0 <= b < RANKS]
    store = torch.distributed.distributed_c10d._get_default_store()
    reach = probe(device, rank=RANK, edges=edges, owner={stage: stage for stage in range(RANKS)}, store=store, until=time.monotonic() + 30)
    wrong = {f"{a}>{b}": why for (a, b), why in reach.items() if why}
    copies = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in rates.items())
    return "ok", (f"rank {RANK}: {copies}; a host wait {1e6 * statistics.median(waits):.0f} us; a delay of {1e3 * asked:.0f} ms took "
                  f"{1e3 * got:.1f}; " + (f"ipc not between {wrong}" if wrong else "ipc between all neighbours"))


def parity(paths=None):
    start()
    model, optimizer, state = gpt.build(seed=7)
    state.restore()
    expected = gpt.train(OWN, model, optimizer, microbatches=6, steps=3)
    state.restore()
    if gpt.any_rank(gpt.difference(expected, gpt.train(OWN, model, optimizer, microbatches=6, steps=3)) is not None):
        return "FAILED", "Megatron's own 1F1B does not repeat its own bits here: nothing can be compared"
    near = gpt.distance_to_one_stage(OWN, model, optimizer, state, microbatches=6)
    seen = []
    for path in paths or PATHS:
        for run_ahead in (0, 1, 2):
            state.restore()
            runtimes.close_all()
            got = gpt.train(schedule(transport=path, run_ahead=run_ahead, limit="2p"), model, optimizer, microbatches=6, steps=3)
            where = gpt.difference(expected, got)
            if gpt.any_rank(where is not None):
                return "FAILED", f"--rrfp-transport {path} --rrfp-run-ahead {run_ahead}: {where or 'on another rank'}"
            seen.append(f"{path}/{run_ahead}")
    runtimes.close_all()
    if gpt.any_rank(near > 1e-4):
        return "FAILED", f"losses or gradients are {near:.2g} (relative) from those of one stage"
    # The control: another order of the same sums must differ, or the comparison sees nothing.
    import rrfp

    rows = [[f"{stage}{kind}{m}" for kind in "FB" for m in [0, 5, 4, 3, 2, 1]] for stage in range(RANKS)]
    rrfp.register_hint("reversed", lambda context: rows)
    state.restore()
    other = schedule(hint="reversed", order="free", mode="strict", limit="6", transport=(paths or PATHS)[0])
    got = gpt.train(other, model, optimizer, microbatches=6, steps=1)
    runtimes.close_all()
    if not gpt.any_rank(gpt.difference(expected[0], got[0]) is not None):
        return "FAILED", "another order gives the same bits: this comparison sees nothing"
    return "ok", f"bitwise by {', '.join(seen)}; {near:.0e} (relative) from one stage; another order is seen"


def nccl():
    return parity(["nccl"])


def delays():
    start()
    model, optimizer, state = gpt.build(seed=8)
    steps = max(4, ITERATIONS // (50 if REHEARSAL else 1))
    padding = Delays()
    runtimes.make_padding = lambda options, *, stages: padding
    weights = []
    for longest in (0.0, 0.0 if REHEARSAL else 2e-3):
        padding.longest = longest
        state.restore()
        runtimes.close_all()
        weights.append(gpt.train(schedule(transport=PATHS[0], limit="2p"), model, optimizer, microbatches=4, steps=steps, keep=False)[-1])
    runtimes.close_all()
    where = gpt.difference(*weights)
    return ("ok" if where is None else "FAILED"), f"{steps} iterations" if where is None else f"after {steps} iterations: {where}"


def time_():
    start()
    model, optimizer, state = gpt.build(seed=9, large=not REHEARSAL)
    took = {}
    runs = {"Megatron's 1F1B": OWN} | {f"rrfp {path}": schedule(transport=path, trace=str(FOLDER / "trace") if path == PATHS[0] else None)
                                       for path in PATHS}
    gaps = ""
    for name, function in runs.items():
        state.restore()
        runtimes.close_all()
        gpt.train(function, model, optimizer, microbatches=8, steps=2, keep=False)
        seconds = []
        for _ in range(3 if REHEARSAL else 8):
            torch.distributed.barrier()
            begin = time.perf_counter()
            gpt.train(function, model, optimizer, microbatches=8, steps=1, keep=False)
            torch.distributed.barrier()
            seconds.append(time.perf_counter() - begin)
        took[name] = statistics.median(seconds)
        if name == f"rrfp {PATHS[0]}":
            last = next(iter(runtimes._runtimes.values())).recorder.last_call
            gaps = f"; rank {RANK}'s gaps (neither computing nor waiting for a message) {100 * last.runtime / last.total:.1f}%"
    runtimes.close_all()
    base = took["Megatron's 1F1B"]
    best = min(seconds for name, seconds in took.items() if name.startswith("rrfp"))
    table = ", ".join(f"{name} {1e3 * seconds:.1f} ms ({seconds / base:.3f})" for name, seconds in took.items())
    how = "" if NCCL_WORLD else " (its messages staged through the host by this check)"
    return ("ok" if best <= 1.02 * base else "slower"), (f"{table}{how}" if RANK == 0 else "") + gaps


def main() -> None:
    try:
        verdict, details = {"memory": memory, "parity": parity, "nccl": nccl, "delays": delays, "time": time_}[PART]()
        result = {"ok": verdict != "FAILED", "verdict": verdict, "details": details}
    except BaseException as error:
        traceback.print_exc()
        result = {"ok": False, "details": f"{type(error).__name__}: {error}".splitlines()[0]}
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    runtimes.close_all()
    os._exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
