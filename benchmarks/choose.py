"""How long one decision takes: `Scheduler.choose` with thousands of ready microbatches, per hint and order.

    python benchmarks/choose.py [--microbatches 4096] [--repeat 2000]

The middle stage of three, split for every hint that needs it. All activations and half of the gradients are there, and half of
the microbatches have gone forward, so that both directions have thousands of candidates.
"""

import argparse
import sys
from statistics import quantiles
from time import perf_counter

from rrfp.action import Action, Edge
from rrfp.placement import Placement
from rrfp.policy import RULES, SPLIT_ONLY, Policy
from rrfp.scheduler import Scheduler
from rrfp.scheduler.lists import LISTS


def prepare(hint: str, order: str, microbatches: int) -> Scheduler:
    """A scheduler with `microbatches` ready forwards and as many ready backwards."""
    split = hint in SPLIT_ONLY
    policy = Policy(hint=hint, order=order, limit=str(2 * microbatches), split=split)
    scheduler = policy.scheduler(Placement.looped(3), 1, 2 * microbatches)
    for m in range(2 * microbatches):
        scheduler.arrived(Edge(0, 1), m)
    for m in range(microbatches):
        scheduler.launched(Action("F", 1, m), 0.0)
        scheduler.completed(Action("F", 1, m), 1.0)
    for m in range(microbatches):
        scheduler.arrived(Edge(2, 1), m)
    return scheduler


def measure(scheduler: Scheduler, repeat: int) -> tuple[list[float], list[float]]:
    """Microseconds of `choose`, and of launching and completing what it chose."""
    choosing, updating = [], []
    for _ in range(repeat):
        start = perf_counter()
        action = scheduler.choose(0.0).action
        chosen = perf_counter()
        scheduler.launched(action, 0.0)
        scheduler.completed(action, 1.0)
        updating.append(1e6 * (perf_counter() - chosen))
        choosing.append(1e6 * (chosen - start))
    return choosing, updating


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=4096, help="ready microbatches per direction")
    parser.add_argument("--repeat", type=int, default=2000)
    parser.add_argument("--bound", type=float, default=10.0, help="microseconds that the median must not exceed")
    options = parser.parse_args()
    print(f"{options.microbatches} ready microbatches per direction; microseconds")
    print(f"{'hint':10} {'order':11} {'choose p50':>10} {'p99':>7} {'launch+complete p50':>20}")
    slow = []
    for hint in (*RULES, *LISTS):
        for order in ("microbatch", "free"):
            choosing, updating = measure(prepare(hint, order, options.microbatches), options.repeat)
            cuts = quantiles(choosing, n=100)
            print(f"{hint:10} {order:11} {cuts[49]:10.2f} {cuts[98]:7.2f} {quantiles(updating, n=2)[0]:20.2f}", flush=True)
            if cuts[49] > options.bound:
                slow.append(f"{hint} ({order})")
    if slow:
        print(f"above {options.bound} us: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
