"""A ViT + LLM learns to read handwritten digits, on the CPU: python benchmarks/multimodal.py [--stages 4 8] [--iterations 250]

scripts/pretrain_vlm.py with scripts/tiny_vlm.args, the ViT on half of the stages, by readiness; then a control that sees black images and so
can learn only the text. Prints one table: the training loss at the beginning and the end, and on held-out images the loss and how many captions
are predicted right, beside what always answering the most frequent caption would score. Exit status 1 with one line if a run misses its mark:
the last loss at most .7 of the first and at most half of the control's, and captions right more often than twice by chance.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rrfp.comm.ports import reserve_port
from rrfp.multimodal.digits import Digits

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {2: "vvvv|tttt", 4: "vv|vv|tt|tt", 8: "v|v|v|v|t|t|t|t"}
PATIENCE = 1800
"""Seconds after which a training is given up."""


class Run(NamedTuple):
    """name; losses of the first and of the last logged iterations; loss and share of right captions on held-out images; seconds."""

    name: str
    first: float
    last: float
    held_out: float
    captions: float
    seconds: float


def train(stages: int, iterations: int, schedule: str, data: str) -> Run:
    arguments = (ROOT / "scripts/tiny_vlm.args").read_text().split()
    step = max(1, iterations // 25)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(stages), "--master-port", str(reserve_port()),
        "-m", "rrfp", "--cpu", str(ROOT / "scripts/pretrain_vlm.py"), *arguments, "--vlm-data", data, "--vlm-layout", LAYOUTS[stages],
        "--pipeline-model-parallel-size", str(stages), "--pipeline-schedule", schedule, "--train-iters", str(iterations),
        "--lr-warmup-iters", "20", "--lr-decay-style", "cosine", "--lr-decay-iters", str(iterations), "--min-lr", "2e-4",
        "--log-interval", str(step), "--eval-interval", str(iterations), "--eval-iters", "8",
    ]  # fmt: skip
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
    text = done.stdout + done.stderr
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{text[-4000:]}")
    losses = [float(found) for found in re.findall(r" lm loss: (\S+)", text)]
    held_out = re.findall(r"validation loss at iteration .*? lm loss value: (\S+) .*?right captions value: (\S+) ", text)[0]
    name = f"{schedule}, {stages} stages" + (", black images (control)" if data.endswith("blank") else "")
    return Run(name, losses[0], sum(losses[-3:]) / 3, *map(float, held_out), time.monotonic() - start)


def chance(samples: int) -> float:
    """The share of the most frequent caption among held-out samples."""
    digits = Digits("valid")
    counts = Counter(bytes(s.tokens[b:e]) for s in map(digits.__getitem__, range(samples)) for b, e in s.captions)
    return counts.most_common(1)[0][1] / counts.total()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], choices=LAYOUTS)
    parser.add_argument("--iterations", type=int, default=250)
    parser.add_argument("--schedule", default="rrfp", choices=["rrfp", "1f1b"])
    args = parser.parse_args()
    by_chance = chance(400)
    print("| run | first loss | last loss | of the first | held-out loss | right captions | seconds |\n| --- | --- | --- | --- | --- | --- | --- |")

    def run(stages, data):
        one = train(stages, args.iterations, args.schedule, data)
        cells = (one.name, f"{one.first:.2f}", f"{one.last:.3f}", f"{one.last / one.first:.3f}", f"{one.held_out:.3f}", f"{one.captions:.1%}",
                 f"{one.seconds:.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)
        return one

    runs = [run(stages, "digits") for stages in args.stages]
    control = run(args.stages[0], "digits-blank")
    print(f"\nby chance {by_chance:.1%} of the captions are right")
    for one in runs:
        if not (one.last <= 0.7 * one.first and one.last <= 0.5 * control.last and one.captions > 2 * by_chance):
            sys.exit(f"{one.name} missed its mark")


if __name__ == "__main__":
    main()
