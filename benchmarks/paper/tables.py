"""The paper's tables, simulated at full size."""

from collections.abc import Callable
from dataclasses import replace
from math import exp, log
from random import Random
from statistics import fmean, stdev

from benchmarks.paper import published
from benchmarks.paper.repro import CONTROL, LADDER, MEGATRON, PAPER, average, blocking_cost, calibrate, ladder, mode_for, run
from benchmarks.paper.table import render, say, seconds, times
from benchmarks.paper.workloads import AGREEMENT, Variation, Workload
from rrfp.simulate.costs import Costs
from rrfp.simulate.scenarios import Jitter

OURS = {"strict eager": "strict:1f1b:eager", "fill-alt 2p": "ready:fill-alt:2p", "fill-r 2p-1, split": "ready:fill-r:2p-1"}
"""One lane, microbatch order: bit for bit 1F1B's results."""
DEPTH_AWARE = ("32", "eager", "2p")


def speedups(rows: list[published.Row], seeds: int) -> None:
    """Tables 1 and 2: every workload under the paper's systems, our controls and our own choices."""
    lines, steps, errors = [], [], []
    for row in rows:
        workload = row.workload
        say(workload)
        last_stage = calibrate(workload, PAPER["RRFP+BFW"], row.times[3])
        got = {label: average(workload, mode, last_stage, seeds=seeds)
               for label, mode in {**PAPER, "strict": CONTROL, **OURS}.items()}
        base = got["1F1B"].seconds
        factor = {label: base / one.seconds for label, one in got.items()}
        errors += [log(factor[label] / theirs) for label, theirs in zip(("RRFP", "RRFP+BFW"), row.speedups[2:], strict=True)]
        lines.append([workload, seconds(row.times[0]), *map(times, row.speedups[1:]), seconds(base),
                      *(times(factor[label]) for label in ("ZB", "RRFP", "RRFP+BFW", "strict")),
                      *(f"{times(factor[label])} ({got[label].peak})" for label in OURS)])
        cost = blocking_cost(workload, last_stage, row.times[0])
        steps.append([workload, *(f"{times(value)} ({peak})" for _, _, value, peak in ladder(workload, last_stage, seeds=seeds)),
                      times(factor["RRFP+BFW"]), f"{1e3 * cost:.1f}" if cost else "none"])
    print(f"Speed-up over Megatron's 1F1B, simulated, mean of {seeds} draws; the speed is calibrated on the paper's RRFP+BFW seconds.")
    print("In parentheses: the most activations in flight on a stage (1F1B, ZB, strict: P; RRFP: 32 or the batch).\n")
    print(render(["TP/PP/DP", "paper: 1F1B s", "ZB", "RRFP", "+BFW", "ours: 1F1B s", "ZB", "RRFP", "+BFW", "strict 1f1b", *OURS],
                 lines))
    print(f"\nRRFP and RRFP+BFW, ours / paper's: geometric mean {exp(fmean(errors)):.2f},"
          f" {exp(min(errors)):.2f} to {exp(max(errors)):.2f}\n")
    print("The product taken apart (factor over the column before, in parentheses the peak). Last: the milliseconds that every message would")
    print("have to hold up both its sides, on top, for modelled 1F1B to be as slow as the paper's.\n")
    print(render(["TP/PP/DP", *(cause for cause, _ in LADDER), "product", "blocking ms"], steps))


def limits(seeds: int) -> None:
    """A flat limit of 32 against limits that know the depth, at the paper's batch and with four times as many microbatches as stages."""
    rows = []
    for row in (published.TABLE1[9], published.TABLE2[0], published.TABLE2[3]):
        last_stage = calibrate(row.workload, PAPER["RRFP+BFW"], row.times[3])
        deep = replace(row.workload, batch=4 * row.workload.stages)
        for workload in (row.workload, deep):
            say(f"{workload}, {workload.microbatches} microbatches")
            base = average(workload, MEGATRON, last_stage, seeds=seeds).seconds
            cells = []
            for hint in ("fill-alt", "fill-r"):
                for limit in DEPTH_AWARE:
                    one = average(workload, f"ready:{hint}:{limit}", last_stage, seeds=seeds)
                    cells.append(f"{times(base / one.seconds)} ({one.peak})")
            rows.append([workload, workload.microbatches, *cells])
    print(f"Speed-up over Megatron's 1F1B by limit (peak in flight), simulated, {seeds} draws, one lane, microbatch order.\n")
    print(render(["TP/PP", "M", *(f"{hint} {limit}" for hint in ("fill-alt", "fill-r") for limit in DEPTH_AWARE)], rows))


def table3(seeds: int) -> None:
    """Where the time of an iteration goes. The speed is calibrated on the compute seconds alone, so every total is a prediction."""
    rows = []
    for tensor, systems in published.TABLE3.items():
        workload = Workload("Qwen3-4B+ViT-Big", 16, 32, tensor)
        for label, theirs in zip(("1F1B", "RRFP"), systems, strict=True):
            last_stage = theirs[1] / fmean(_computing(workload.costs(1.0, seed)) for seed in range(seeds))
            coordination = 2 * workload.microbatches * AGREEMENT[tensor] if label == "RRFP" else 0.0
            for system in (label, *(("strict 1f1b", "strict eager", "ours: fill-alt 2p") if label == "RRFP" else ())):
                mode = {"1F1B": MEGATRON, "RRFP": PAPER["RRFP"], "strict 1f1b": CONTROL, "strict eager": OURS["strict eager"]}.get(
                    system, OURS["fill-alt 2p"])
                one = average(workload, mode, last_stage, seeds=seeds)
                compute = fmean(_computing(workload.costs(last_stage, seed)) for seed in range(seeds))
                rows.append([f"TP {tensor}, {system}", *((f"{value:.3f}" for value in theirs) if system == label else [None] * 4),
                             f"{one.seconds:.3f}", f"{compute:.3f}", f"{one.seconds - compute - coordination:.3f}",
                             f"{coordination:.3f}" if system == label else None, one.peak])
    print(f"Seconds per iteration, Qwen3-4B+ViT-Big, PP 16, batch 32; simulated, mean of {seeds} draws, calibrated on compute alone.\n")
    print(render(["", "paper: iteration", "compute", "blocking", "agreement", "ours: iteration", "compute", "blocking", "agreement",
                  "peak"], rows))


def _computing(costs: Costs) -> float:
    """Seconds of work per stage, in the mean."""
    return sum(value for (kind, _, _), value in costs.durations.items() if kind in "FB") / costs.stages


def table45(seeds: int) -> None:
    """The paper's comparison with other systems. Neither is installed here; docs/compare.md has the recipes."""
    rows = [[model, layout, seconds(deepspeed) if deepspeed else "not run", seconds(cornstarch), seconds(rrfp),
             times(min(filter(None, (deepspeed, cornstarch))) / rrfp)] for model, layout, deepspeed, cornstarch, rrfp in published.TABLE45]
    print("The paper's seconds. Nothing of this can be run here: DeepSpeed and Cornstarch need GPUs and a training of the real models.")
    print("docs/compare.md says how to run them on a machine that has them; PyTorch's own schedules run as `rrfp compare` modes.\n")
    print(render(["workload", "TP/PP/DP", "DeepSpeed", "Cornstarch", "RRFP", "gain over the faster"], rows))


def table7(seeds: int) -> None:
    """Hints: Qwen3-1.7B+ViT-H, PP 8, batch 192."""
    workload = Workload("Qwen3-1.7B+ViT-H", 8, 192)
    last_stage = calibrate(workload, PAPER["RRFP"], published.TABLE7["bf"])
    ways = {"any order": "32:free:lanes={microbatches}", "one lane, in order": "32", "the same at 2p": "2p"}
    got = {(hint, way): average(workload, f"ready:{hint}:{rest}", last_stage, seeds=seeds)
           for hint in (*published.TABLE7, "alt", "fill-alt") for way, rest in ways.items()}
    rows = []
    for hint in (*published.TABLE7, "alt", "fill-alt"):
        theirs = published.TABLE7.get(hint)
        cells = [f"{got[hint, way].seconds:.3f} ({100 * (got[hint, way].seconds / got['bf', way].seconds - 1):+.2f}%)" for way in ways]
        rows.append([hint, f"{theirs:.3f} ({100 * (theirs / published.TABLE7['bf'] - 1):+.2f}%)" if theirs else None, *cells])
    controls = {label: average(workload, mode, last_stage, seeds=seeds)
                for label, mode in (("Megatron's 1F1B", MEGATRON), ("strict 1f1b", CONTROL), ("strict eager", OURS["strict eager"]))}
    print(f"Seconds per iteration (difference from bf), simulated, mean of {seeds} draws, calibrated on the paper's BF in any order.\n")
    print(render(["hint", "paper", *ways], rows))
    print("\nBeside it: " + ", ".join(f"{label} {one.seconds:.3f} s (peak {one.peak})" for label, one in controls.items())
          + "; peak 32 at limit 32, 16 at 2p.")


def table8(seeds: int) -> None:
    """Depth, vision tower, batch. The speed is that of the model's row in table 1 or 2."""
    rows = []
    for axis, what, points in published.TABLE8:
        for workload, theirs in points:
            say(workload)
            last_stage = _speed_of(workload)
            base = average(workload, MEGATRON, last_stage, seeds=seeds).seconds
            got = {mode: average(workload, mode, last_stage, seeds=seeds)
                   for mode in (CONTROL, PAPER["RRFP"], PAPER["RRFP+BFW"], OURS["strict eager"], OURS["fill-alt 2p"])}
            rows.append([f"{axis} ({what})", workload, workload.batch, times(theirs),
                         *(f"{times(base / got[mode].seconds)} ({got[mode].peak})" for mode in (PAPER["RRFP"], PAPER["RRFP+BFW"])),
                         *(f"{times(base / got[mode].seconds)} ({got[mode].peak})"
                           for mode in (CONTROL, OURS["strict eager"], OURS["fill-alt 2p"]))])
    print(f"Speed-up over Megatron's 1F1B (peak in flight), simulated, mean of {seeds} draws.\n")
    print(render(["axis", "TP/PP", "batch", "paper", "ours: RRFP", "+BFW", "strict 1f1b", "strict eager", "fill-alt 2p"], rows))


def _speed_of(workload: Workload) -> float:
    """Seconds of the last stage's forward, at the speed that the nearest row of table 1 or 2 was calibrated to."""
    rows = [row for row in (*published.TABLE1, *published.TABLE2) if row.workload.model.split("+")[0] == workload.model.split("+")[0]]
    row = min(rows, key=lambda row: (row.workload.model != workload.model, row.workload.tensor != workload.tensor,
                                     abs(row.workload.stages - workload.stages)))
    operations = workload.last_operations / workload.tensor / (row.workload.last_operations / row.workload.tensor)
    return operations * calibrate(row.workload, PAPER["RRFP+BFW"], row.times[3])


def jitter(seeds: int) -> None:
    """Injected jitter J0 to J3: Qwen3-4B+ViT-Big, TP 2, PP 8, batch 96; 30 iterations as the paper's 3 x 10."""
    workload = Workload("Qwen3-4B+ViT-Big", 8, 96, 2)
    last_stage = calibrate(workload, PAPER["RRFP"], published.JITTER["J0"][1][0])
    modes = {"1F1B": MEGATRON, "RRFP": PAPER["RRFP"], "strict 1f1b": CONTROL, "strict eager": OURS["strict eager"],
             "fill-alt 2p": OURS["fill-alt 2p"]}
    rows, calm = [], {}
    for level, theirs in published.JITTER.items():
        measured = {label: [] for label in modes}
        for seed in range(seeds):
            costs = inject(workload.costs(last_stage, seed), level, seed)
            for label, mode in modes.items():
                measured[label].append(run(costs, mode_for(mode, workload), agreement=AGREEMENT[2]).makespan)
        cells = []
        for values in theirs:
            cells.append(f"{values[0]:.2f} ({100 * (values[0] / published.JITTER['J0'][theirs.index(values)][0] - 1):.1f}%, {values[1]:.2f})")
        for label, values in measured.items():
            calm.setdefault(label, fmean(values))
            spread = stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{fmean(values):.2f} ({100 * (fmean(values) / calm[label] - 1):.1f}%, {spread:.2f})")
        rows.append([level, *cells])
    print(f"Seconds per iteration (slowdown against J0, standard deviation), simulated, {seeds} draws.\n")
    print(render(["level", "paper: 1F1B", "RRFP", *(f"ours: {label}" if label == "1F1B" else label for label in modes)], rows))


def inject(costs: Costs, level: str, seed: int) -> Costs:
    """The costs with the paper's jitter on every stage's F and B, drawn in microbatch order; I carries B's share."""
    rng, durations = Random(f"{level}/{seed}"), dict(costs.durations)
    for s in range(costs.stages):
        stage = Jitter(level)
        for m in range(costs.microbatches):
            for kind, split in (("F", None), ("B", "I")):
                extra = stage.after(costs.durations[kind, s, m], rng)
                durations[kind, s, m] += extra
                if split:
                    durations[split, s, m] += extra
    return replace(costs, durations=durations)


FITTED = [row for row in published.TABLE1 if row.workload.tensor == 1]
IMAGES = {"all alike": (2.5,), "1 1 2 3 3 5": (1, 1, 2, 3, 3, 5), "0 0 1 2 4 8": (0, 0, 1, 2, 4, 8)}
LATE = (0.0, 0.15, 0.3, 0.6)
SHALLOW = Workload("Qwen3-1.7B+ViT-H", 4, 192)


def fit(seeds: int) -> None:
    """How well each assumption about images and late messages explains table 1, figure 5 and the shallow pipeline of table 8."""
    rows = []
    for name, images in IMAGES.items():
        for late in LATE:
            say(f"{name}, {100 * late:.0f}% late")
            rows.append([name, f"{100 * late:.0f}%", *_explained(Variation(images=images, late=late), seeds)])
    limited = (times(published.FIGURE5[limit] / published.FIGURE5[32]) for limit in (8, 16))
    rows.append(["paper", None, None, None, *(times(row.speedups[2]) for row in FITTED), times(published.TABLE8[0][2][0][1]), *limited, None])
    print("RRFP and RRFP+BFW at TP 1 in table 1 (12 speed-ups) as each assumption predicts them. Late messages take up to 31 ms more.\n")
    print(render(["images per sample", "late", "ours / paper's", "typical error", *(f"RRFP, {row.workload}" for row in FITTED),
                  f"{SHALLOW}", "limit 8 / 32", "limit 16 / 32", "blocking ms, 1/8"], rows))


def _explained(variation: Variation, seeds: int) -> list[str]:
    """The cells of one assumption: the geometric mean of ours / the paper's, the typical error, every RRFP speed-up, ..."""

    def took(workload: Workload, mode: str, last_stage: float) -> float:
        return average(workload, mode, last_stage, seeds=seeds, variation=variation).seconds

    errors, speedup, last_stages = [], {}, {}
    for row in FITTED:
        last_stages[row.workload] = last_stage = calibrate(row.workload, PAPER["RRFP+BFW"], row.times[3], variation=variation)
        base, fused, split = (took(row.workload, mode, last_stage) for mode in (MEGATRON, PAPER["RRFP"], PAPER["RRFP+BFW"]))
        speedup[row.workload] = base / fused
        errors += [log(base / fused / row.speedups[2]), log(base / split / row.speedups[3])]
    middle, deep = (next(row for row in FITTED if row.workload == Workload(model, 8, 192)) for model in
                    ("Qwen3-1.7B+ViT-H", "Qwen3-4B+ViT-Big"))
    shallow = last_stages[middle.workload] * SHALLOW.last_operations / middle.workload.last_operations
    flat = took(deep.workload, PAPER["RRFP"], last_stages[deep.workload])
    knee = [took(deep.workload, f"ready:bf:{limit}:free:lanes=192", last_stages[deep.workload]) / flat for limit in (8, 16)]
    cost = blocking_cost(middle.workload, last_stages[middle.workload], middle.times[0], variation=variation)
    return [times(exp(fmean(errors))), f"{100 * (exp(fmean(e * e for e in errors) ** 0.5) - 1):.0f}%", *map(times, speedup.values()),
            times(took(SHALLOW, MEGATRON, shallow) / took(SHALLOW, PAPER["RRFP"], shallow)), *map(times, knee),
            f"{1e3 * cost:.1f}" if cost else "none"]


EXPERIMENTS: dict[str, Callable[[int], None]] = {
    "table1": lambda seeds: speedups(published.TABLE1, seeds), "table2": lambda seeds: speedups(published.TABLE2, seeds), "table3": table3,
    "table45": table45, "table7": table7, "table8": table8, "jitter": jitter, "limits": limits, "fit": fit,
}  # fmt: skip
