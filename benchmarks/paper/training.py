"""Appendix E: the same losses. A tiny GPT on real text, trained by Megatron's 1F1B and by RRFP (BF), every digit compared.

The paper overlays loss curves of its GPT-3-Large and Qwen3-1.7B+ViT-H trainings, on GPUs. Here a model of four small layers is trained
for real on the CPU, with the paper's three seeds, 500 iterations, and an evaluation of 10 iterations every 50.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

from benchmarks.paper.table import render

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (42, 1234, 2026)
WAYS = {"Megatron 1F1B": ["--pipeline-schedule", "1f1b"],
        "RRFP bf": ["--pipeline-schedule", "rrfp", "--rrfp-hint", "bf", "--rrfp-limit", "32"]}
SIZES = "--hidden-size 32 --seq-length 32 --max-position-embeddings 32"


def train(flags: list[str], *, seed: int, stages: int, iterations: int, deadline: float) -> list[str]:
    """Megatron's log of iterations and evaluations, digit for digit, without the times.

    Raises RuntimeError with the log's end if the training fails or is not done in time.
    """
    every = max(1, iterations // 10)
    command = ["bash", str(ROOT / "scripts/pretrain_gpt.sh"), "--cpu", *SIZES.split(), "--seed", str(seed), "--train-iters",
               str(iterations), "--eval-interval", str(every), "--eval-iters", "10", *flags]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"STAGES": str(stages)}, stdout=output, stderr=output)
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            code = f"none after {deadline:.0f} s; {process.wait(60)}"
        output.seek(0)
        text = output.read()
    if code != 0:
        raise RuntimeError(f"{' '.join(flags)}: exit status {code}:\n{text[-3000:]}")
    # Up to the last field: ranks write to one file, and another's line may come before this one's newline.
    lines = re.findall(r"iteration +\d+/ *\d+ \|.*?nan iterations: +\d+ \|| validation loss at iteration.*?PPL: \S+ \|", text)
    return [re.sub(r"elapsed time per iteration \(ms\): \S+ \| ", "", line).strip() for line in lines]


def losses(log: list[str]) -> list[float]:
    """The training loss of every iteration."""
    return [float(found[1]) for line in log if (found := re.search(r"lm loss: (\S+) .*grad norm", line))]


def evaluations(log: list[str]) -> list[float]:
    return [float(found[1]) for line in log if (found := re.search(r"validation loss at iteration.*lm loss value: (\S+)", line))]


def different(one: list[str], other: list[str]) -> list[tuple[str | None, str | None]]:
    """Lines of two logs that are not equal to the last digit, side by side; None where only one log has a line."""
    return [(a, b) for a, b in zip_longest(one, other) if a != b]


def appendix_e(*, seeds: tuple[int, ...] = SEEDS, stages: int = 4, iterations: int = 500, picture: Path | None = None,
               deadline: float = 600.0) -> int:
    """Prints the comparison; the number of lines that differ between schedules (0 is the claim)."""
    logs: dict[tuple[int, str], list[str]] = {}
    for seed in seeds:
        for way, flags in WAYS.items():
            start = time.monotonic()
            logs[seed, way] = train(flags, seed=seed, stages=stages, iterations=iterations, deadline=deadline)
            print(f"seed {seed}, {way}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    reference, rows, total = next(iter(WAYS)), [], 0
    for seed in seeds:
        for way in WAYS:
            log = logs[seed, way]
            apart, values, evaluated = different(logs[seed, reference], log), losses(log), evaluations(log)
            total += len(apart)
            for line, other in apart[:10]:
                print(f"seed {seed}, {reference}: {line}\n{' ' * len(f'seed {seed}')}  {way}: {other}", file=sys.stderr, flush=True)
            rows.append([seed, way, f"{values[0]:.6f}", f"{values[-1]:.6f}", f"{evaluated[-1]:.6f}" if evaluated else None,
                         len(values), len(evaluated), f"{len(apart)} of {len(log)}" if way != reference else "reference"])
    control = sum(len(different(logs[seeds[0], reference], logs[seed, reference])) for seed in seeds[1:])
    print(f"{iterations} iterations, {stages} stages, 8 microbatches; losses, gradient norms and evaluations as Megatron logs them\n")
    print(render(["seed", "schedule", "first loss", "last loss", "last evaluation", "iterations", "evaluations", "lines that differ"],
                 rows))
    if len(seeds) > 1:
        print(f"\nControl: {control} lines differ between seeds.")
    if picture is not None:
        draw(logs, picture)
    return total


def draw(logs: dict[tuple[int, str], list[str]], path: Path) -> None:
    """The loss curves: 1F1B as a wide line, RRFP as a thin one on it. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seeds = list(dict.fromkeys(seed for seed, _ in logs))
    figure, axes = pyplot.subplots(1, len(seeds), figsize=(4 * len(seeds), 3), sharey=True, squeeze=False, layout="constrained")
    for seed, panel in zip(seeds, axes[0], strict=True):
        for way, (width, colour) in zip(WAYS, ((4, "tab:orange"), (0.8, "black")), strict=True):
            values = losses(logs[seed, way])
            panel.plot(range(1, len(values) + 1), values, linewidth=width, color=colour, label=way)
        panel.set(title=f"seed {seed}", xlabel="iteration", yscale="log")
    axes[0][0].set_ylabel("loss")
    axes[0][-1].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
