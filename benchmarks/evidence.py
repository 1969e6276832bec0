"""The table of evidence: python benchmarks/evidence.py [--stages 8] [--microbatches 32] [--seeds 0-4] [--out DIR]

`rrfp compare` on eight scenarios with the modes that take a speed-up apart, side by side per scenario; then one table of medians, and the
geometric means over the scenarios. About 23 minutes at the default sizes; nothing else should run meanwhile.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

from rrfp.compare.command import main as compare

SCENARIOS = ("uniform", "jitter-0.3", "lengths", "images-tokens", "mixed", "spikes", "paper-language", "paper-multimodal")
MODES = {
    "megatron-1f1b": "Megatron",
    "strict:1f1b:1f1b": "strict 1f1b",
    "ready:alt:1f1b": "alt, 1f1b",
    "ready:announced:1f1b": "announced, 1f1b",
    "strict:1f1b:eager": "strict eager",
    "ready:alt:2p": "alt, 2p",
    "ready:fill:2p-1:split": "fill split",
    "ready:alt:2p-1:split": "alt split",
    "ready:fill-r:2p-1": "fill-r split",
    "ready:fill-r:2p-1:free:lanes=4": "fill-r split, lanes",
}


def table(found: dict[str, dict]) -> list[str]:
    """Markdown: seconds of Megatron's 1F1B, then how much faster each mode is and (in parentheses) its distance from its bound."""
    names = list(next(iter(found.values())))
    lines = ["| scenario | " + " | ".join(MODES.get(name, name) for name in names) + " |", "| --- " * (len(names) + 1) + "|"]
    for scenario, rows in found.items():
        cells = [f"{row['median_s']:.2f} s ({row['over_bound']:.2f})" if name == "megatron-1f1b"
                 else f"{row['ratio']:.2f} ({row['over_bound']:.2f})" for name, row in rows.items()]
        lines.append(f"| {scenario} | " + " | ".join(cells) + " |")
    means = [f"{_mean(rows[name]['ratio'] for rows in found.values()):.2f} "
             f"({_mean(rows[name]['over_bound'] for rows in found.values()):.3f})" for name in names]
    lines.append("| geometric mean | " + " | ".join(means) + " |")
    lines += ["", "Peak in flight per stage, the largest over the scenarios:", ""]
    for name in names:
        peaks = [max(column) for column in zip(*(rows[name]["peak_in_flight"] for rows in found.values()), strict=True)]
        lines.append(f"* {MODES.get(name, name)} (`{name}`): {' '.join(f'{peak:g}' for peak in peaks)}")
    return lines


def _mean(values) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="8")
    parser.add_argument("--microbatches", default="32")
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--unit", default="0.02")
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--out", type=Path, help="keep the JSON of every scenario there")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        for scenario in options.scenarios:
            file = out / f"{scenario.replace(':', '-')}.json"
            status = compare(["--stages", options.stages, "--microbatches", options.microbatches, "--scenario", scenario, "--seeds",
                              options.seeds, "--unit", options.unit, "--json", str(file), "--modes", *options.modes])
            if status:
                return status
            sys.stdout.flush()
            found[scenario] = {mode["name"]: mode for mode in json.loads(file.read_text())["modes"]}
    print("\n" + "\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
