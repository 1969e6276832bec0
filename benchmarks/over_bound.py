"""How far policies are from what no schedule can beat, in simulation: medians over seeds, geometric means over scenarios.

`python benchmarks/over_bound.py MODE ...` prints, for every mode, its time over the lower bound (which knows neither limits nor
orders), the same of the tight bound for that mode's limits and order, and the time of Megatron's 1F1B (`megatron`, modelled) over
its time. A mode that ends in `@` is fed its microbatches in organ-pipe order of the sizes that the data tell; Megatron's 1F1B that it
is compared with is not, see `megatron@`.
"""

import argparse
from collections.abc import Callable
from math import exp, log
from statistics import median

from rrfp.mode import parse_mode
from rrfp.simulate.bounds import lower_bound, tight_bound
from rrfp.simulate.costs import Costs, from_scenario
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.simulate.scenarios import BY_SIZE

SCENARIOS = ("uniform", "jitter-0.3", "lengths", "images-tokens", "mixed", "spikes", "paper-language", "paper-multimodal")


def runner(mode: str) -> Callable[[Costs], tuple[float, float, float]]:
    """Of a call: makespan, lower bound, and tight bound under the mode's limits and order."""
    if mode == "megatron":
        return lambda costs: (simulate_megatron_1f1b(costs).makespan, lower_bound(costs, split=False).seconds, float("nan"))
    policy = parse_mode(mode)

    def run(costs: Costs) -> tuple[float, float, float]:
        limits = policy.limits(costs.placement, costs.microbatches)
        return (costs.simulate(policy).makespan, lower_bound(costs, split=policy.split).seconds,
                tight_bound(costs, split=policy.split, limits=limits, order=policy.order))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", metavar="MODE")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--seeds", default="15-44", metavar="A-B")
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS, metavar="NAME")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split("-"))
    calls = {name: [from_scenario(name, stages=options.stages, microbatches=options.microbatches, unit=1.0, seed=seed)
                    for seed in range(first, last + 1)] for each in options.scenarios for name in (each, BY_SIZE + each)}
    base = {name: [simulate_megatron_1f1b(call).makespan for call in calls[name]] for name in options.scenarios}
    print(f"{options.stages} stages, {options.microbatches} microbatches, seeds {options.seeds}")
    print(f"{'time over the lower bound':38}", *(f"{name[:12]:>12}" for name in options.scenarios), " all  bound  over Megatron", sep=" ")
    for mode in options.modes:
        run = runner(mode.removesuffix("@"))
        ratios, tight, gain = [], [], []
        for name in options.scenarios:
            found = [run(call) for call in calls[BY_SIZE + name if mode.endswith("@") else name]]
            ratios.append(median(time / bound for time, bound, _ in found))
            tight.append(median(sharp / bound for _, bound, sharp in found))
            gain.append(median(other / time for (time, _, _), other in zip(found, base[name], strict=True)))
        print(f"{mode:38}", *(f"{ratio:12.3f}" for ratio in ratios), f"{_mean(ratios):.3f}  {_mean(tight):.3f}  {_mean(gain):.3f}",
              flush=True)


def _mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


if __name__ == "__main__":
    main()
