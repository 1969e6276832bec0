"""`python -m rrfp.simulate POLICY ...`: policies against a fixed list, under the emulation scenarios. Nothing is run for real."""

import argparse
import sys
from collections.abc import Sequence
from math import exp, log
from statistics import median

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.simulate.clock import simulate
from rrfp.simulate.scenarios import CALM, SCENARIOS, draw

_WAYS = ("ready", "strict", "split", "free", "megatron")


def parse_policy(text: str) -> Policy:
    """`HINT:LIMIT`, then any of :strict, :split, :free, :megatron. Raises ConfigurationError."""
    hint, _, rest = text.partition(":")
    words = rest.split(":")
    options = [word for word in words if word in _WAYS]
    limit = ":".join(word for word in words if word not in _WAYS) or "1f1b"
    order = next((word for word in ("free", "megatron") if word in options), "microbatch")
    mode = "strict" if "strict" in options else "ready"
    return Policy(hint=hint, limit=limit, mode=mode, order=order, split="split" in options)


def parse_seeds(text: str) -> range:
    """`15-44` or `15`."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and int(low) <= int(high or low)):
        raise argparse.ArgumentTypeError(f"{text!r}: write a seed like 15, or a range like 15-44")
    return range(int(low), int(high or low) + 1)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rrfp.simulate", description=__doc__)
    parser.add_argument("policies", nargs="+", metavar="POLICY",
                        help="HINT:LIMIT[:strict][:split][:free|:megatron], like fill-r:2p-1:split")
    parser.add_argument("--against", default="1f1b:1f1b:strict", metavar="POLICY", help="the baseline (default %(default)s)")
    parser.add_argument("--ranks", type=at_least_one, default=8)
    parser.add_argument("--chunks", type=at_least_one, default=1, help="stages per rank, interleaved as Megatron does")
    parser.add_argument("--microbatches", type=at_least_one, default=32)
    parser.add_argument("--lanes", type=at_least_one, default=1)
    parser.add_argument("--seeds", type=parse_seeds, default=range(15, 20), metavar="A-B", help="default 15-19")
    parser.add_argument("--announce-delay", type=float, default=0.0, help="in units of F")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS, metavar="NAME")
    parser.add_argument("--each", action="store_true", help="also print the median of every scenario")
    options = parser.parse_args(arguments)
    placement = Placement.looped(options.ranks, options.chunks)

    def makespan(policy: Policy, draws) -> float:
        result = simulate(policy, placement, options.microbatches, *draws, lanes=options.lanes,
                          announce_delay=options.announce_delay)
        return result.makespan

    try:
        baseline = parse_policy(options.against)
        policies = {text: parse_policy(text) for text in options.policies}
        draws = {(name, seed): draw(name, placement.stages, options.microbatches, 1 / options.chunks, seed)
                 for name in options.scenarios for seed in options.seeds}
        base = {key: makespan(baseline, value) for key, value in draws.items()}
        print(f"{options.ranks} ranks, {options.chunks} chunks, {options.microbatches} microbatches, {len(options.seeds)} seeds; "
              f"time of {options.against} / time of the policy, above 1 is faster")
        print(f"{'policy':28} {'peak':>5} {'all':>7} {'worst calm median':>18} {'late and mixed':>15} {'worst draw':>11}")
        for text, policy in policies.items():
            ratio = {key: base[key] / makespan(policy, value) for key, value in draws.items()}
            medians = {name: median(ratio[name, seed] for seed in options.seeds) for name in options.scenarios}
            calm, late = ([m for n, m in medians.items() if (n in CALM) is wanted] for wanted in (True, False))
            print(f"{text:28} {max(policy.limits(placement, options.microbatches)):5} {_mean(medians.values()):7.3f} "
                  f"{min(calm) if calm else float('nan'):18.3f} {_mean(late):15.3f} {min(ratio.values()):11.3f}", flush=True)
            if options.each:
                print("   " + "  ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _mean(values) -> float:
    """Geometric mean; nan if there is none."""
    values = list(values)
    return exp(sum(map(log, values)) / len(values)) if values else float("nan")


if __name__ == "__main__":
    sys.exit(main())
