"""What ZeRO holds on each device, measured, against the formula; and the largest batch that fits a budget.

`python -m benchmarks.zero [--hidden 256] [--layers 16] [--budget 72] [--layouts 2:0 2:3] [--grain 8]`

Four processes, 1F1B, Adam, a bucket per layer, one bucket gathered ahead. Bytes are those that the C library has handed out
(`rrfp.heap`), above what was there before the program was opened, looked at when an action or a collective ends. So an action's own
temporaries (a backward's fresh gradients beside those that they are added to) are only in it where a stream's thread looked meanwhile; buffers
of gloo and of sockets are. The first table is at one row per microbatch, where activations are next to nothing. The second finds, by bisection, the most rows
per microbatch at which the measured peak of every device, activations included, stays within the budget: the bound is the counted
peak, nothing is killed.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import distributed as dist

import rrfp.program
from benchmarks.program_job import Dense, in_stages, make, run
from rrfp import heap
from rrfp.program.builders import BUILDERS
from rrfp.program.dag import REDUCE_SCATTER, Node
from rrfp.program.execute.compiled import Emulation
from rrfp.program.memory import memory

DEVICES, MICROBATCHES, MB = 4, 4, 2**20
LAYOUTS = [(1, zero) for zero in range(4)] + [(2, zero) for zero in range(4)] + [(4, 0)]
"""(pipeline ranks, ZeRO). What is left of the devices are replicas."""


class Meter:
    """The most that was held at the end of an action or a collective, above `start`, in bytes.

    scatter: seconds that a REDUCE_SCATTER takes at least: slower than the computation, so that gradients would pile up.
    """

    def __init__(self, scatter: float):
        self.start, self._scatter = heap.held(), scatter
        self.reset()

    def reset(self) -> None:
        self.peak = 0

    def now(self) -> int:
        return heap.held() - self.start

    def seconds(self, node: Node) -> float:
        """It is called when a node ends. Emulated is nothing but `scatter`."""
        self.peak = max(self.peak, self.now())
        return self._scatter if node.kind == REDUCE_SCATTER else 0.0


class Opened:
    """A program, and what its steps hold on this device."""

    def __init__(self, captured, ranks: int, zero: int, scatter: float = 0.0):
        replicas = DEVICES // ranks
        directives = BUILDERS["1f1b"](ranks, MICROBATCHES, **({"replicas": replicas, "zero": zero} if replicas > 1 else {}))
        self._hidden = next(iter(captured.traced.tensors.values())).shape[-1]
        self.meter = Meter(scatter)
        self.program = rrfp.program.compile(in_stages(captured, ranks), directives, mode="strict", optimizer=torch.optim.Adam,
                                            emulation=Emulation(self.meter.seconds))
        self.opened = self.meter.now()
        lowered = self.program.program
        self.formula = memory(lowered, lowered.rank_of[dist.get_rank()])

    def peak(self, rows: int) -> int:
        """Bytes in two steps of so many rows per microbatch, the largest over all devices; `own` is this device's."""
        batch = {"x": torch.randn(MICROBATCHES * rows, self._hidden)}
        self.meter.reset()
        for _ in range(2):
            self.program.step(batch)
        found = torch.tensor(self.meter.peak - batch["x"].nbytes)
        self.own = int(found)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


def on_rank(hidden: int, layers: int, *layout) -> dict:
    """`states` of a model that each process captures for itself."""
    return states(make(layers, hidden, Dense), *layout)


def states(captured, ranks: int, zero: int, scatter: float = 0.0) -> dict:
    """One device's bytes when opened, in a step, and after it; ZeRO-3's gathered parameters; and the formula."""
    opened = Opened(captured, ranks, zero, scatter)
    try:
        opened.peak(1)
        formula = opened.formula
        return {"opened": opened.opened, "after": opened.meter.now(), "peak": opened.own, "gathered": opened.program.peak.gathered,
                "formula": asdict(formula) | {"total": formula.total}}
    finally:
        opened.program.close()


def fitting(captured, ranks: int, zero: int, budget: int, grain: int) -> tuple[int, int]:
    """(the most rows per microbatch whose peak is within the budget on every device, that peak); 0 rows if not even one fits."""
    opened = Opened(captured, ranks, zero)
    try:
        return largest(opened.peak, budget, grain=grain)
    finally:
        opened.program.close()


def largest(peak: Callable[[int], int], budget: int, *, grain: int) -> tuple[int, int]:
    """By doubling, then bisection to a multiple of `grain`."""
    good, held, bad = 0, 0, grain
    while (found := peak(bad)) <= budget:
        good, held, bad = bad, found, 2 * bad
    while bad - good > grain:
        middle = (good + bad) // (2 * grain) * grain
        if (found := peak(middle)) <= budget:
            good, held = middle, found
        else:
            bad = middle
    return good, held


def name(ranks: int, zero: int) -> str:
    replicas = DEVICES // ranks
    return " x ".join(filter(None, [f"PP {ranks}" if ranks > 1 else "", f"DP {replicas}, ZeRO-{zero}" if replicas > 1 else ""]))


def mb(count: float) -> str:
    return f"{count / MB:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--budget", type=float, default=72.0, help="MB of a device, without the process itself")
    parser.add_argument("--layouts", nargs="+", metavar="P:ZERO", help="pipeline ranks and ZeRO's stage (default: all that are documented)")
    parser.add_argument("--grain", type=int, default=8, help="rows per microbatch are a multiple of it")
    options = parser.parse_args()
    layouts = [tuple(map(int, each.split(":"))) for each in options.layouts or ()] or LAYOUTS
    captured = make(options.layers, options.hidden, Dense)
    columns = ("parameters", "gradients", "optimizer", "pool", "scattered", "total")
    print("| MB on the first device | parameters | gradients | Adam | gathered | scattered | sum | measured | measured / sum |")
    print("| --- " * 9 + "|")
    for ranks, zero in layouts:
        found = run(DEVICES, states, captured, ranks, zero)[0]
        cells = [mb(found["formula"][column]) for column in columns] + [mb(found["peak"]), f"{found['peak'] / found['formula']['total']:.2f}"]
        print(" | ".join([f"| {name(ranks, zero)}", *cells]) + " |", flush=True)
    print(f"\n| within {options.budget:g} MB | rows per microbatch | rows of all replicas | peak MB |\n" + "| --- " * 4 + "|")
    for ranks, zero in layouts:
        rows, held = run(DEVICES, fitting, captured, ranks, zero, int(options.budget * MB), options.grain)[0]
        print(f"| {name(ranks, zero)} | {rows} | {rows * DEVICES // ranks * MICROBATCHES} | {mb(held)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
