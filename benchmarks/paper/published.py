"""Every number of the paper (arXiv 2605.18750 v1) that is set beside ours. Seconds per iteration unless said otherwise."""

from dataclasses import dataclass

from benchmarks.paper.workloads import Workload


@dataclass(frozen=True)
class Row:
    """One line of table 1 or 2: 1F1B, ZeroBubble (which variant is not said), RRFP with BF, RRFP with BFW."""

    workload: Workload
    times: tuple[float, float, float, float]

    @property
    def speedups(self) -> list[float]:
        return [self.times[0] / time for time in self.times]


def _rows(model: str, batches: dict[int, int], *lines) -> list[Row]:
    return [Row(Workload(model, stages, batches[tensor], tensor, data), times) for tensor, stages, data, times in lines]


TABLE1 = [
    *_rows("GPT3-Large", {1: 64, 2: 64},
           (1, 8, 1, (3.28, 2.97, 2.29, 2.10)), (1, 16, 1, (2.09, 1.74, 1.26, 1.18)),
           (2, 8, 1, (3.66, 3.27, 3.03, 2.81)), (2, 16, 1, (2.34, 2.03, 1.63, 1.57))),
    *_rows("Qwen3-1.7B+ViT-H", {1: 192, 2: 192},
           (1, 8, 1, (11.49, 9.91, 5.98, 5.68)), (1, 16, 1, (9.04, 7.40, 4.50, 4.33)),
           (2, 8, 1, (12.94, 11.86, 7.66, 7.41)), (2, 16, 1, (12.54, 11.95, 7.07, 6.74))),
    *_rows("Qwen3-4B+ViT-Big", {1: 192, 2: 96},
           (1, 8, 1, (14.05, 12.61, 7.84, 7.52)), (1, 16, 1, (11.01, 9.98, 5.02, 4.81)),
           (2, 8, 1, (7.19, 6.60, 4.45, 4.19)), (2, 16, 1, (6.29, 5.99, 2.94, 2.81))),
]  # fmt: skip
TABLE2 = [
    *_rows("LLaMA3-8B+ViT-5B", {1: 64, 2: 64},
           (1, 32, 1, (7.62, 6.58, 3.38, 2.75)), (2, 16, 1, (8.30, 7.84, 3.52, 3.04)), (2, 8, 2, (4.90, 4.44, 3.02, 2.77))),
    *_rows("Qwen3-32B+InternViT", {1: 64, 2: 64},
           (1, 64, 1, (8.03, 7.35, 4.46, 4.37)), (2, 32, 1, (8.39, 7.66, 5.19, 4.66)), (2, 16, 2, (5.14, 4.90, 4.06, 3.74))),
    *_rows("LLaMA3-70B+ViT-22B", {2: 64},
           (2, 64, 1, (8.72, 7.94, 5.16, 4.76)), (2, 32, 2, (7.23, 6.67, 4.71, 4.63))),
]  # fmt: skip

TABLE3 = {
    1: ((2.581, 0.859, 1.722, 0.0), (1.788, 1.020, 0.768, 0.0)),
    2: ((2.644, 0.946, 1.698, 0.0), (1.824, 1.026, 0.788, 0.010)),
    4: ((2.750, 0.938, 1.812, 0.0), (1.942, 1.054, 0.873, 0.015)),
}
"""By tensor-parallel size, 1F1B and RRFP: iteration, compute, blocking, coordination."""

TABLE45 = [
    ("GPT3-Large", "1/8", 2.60, 2.63, 2.29), ("GPT3-Large", "1/16", 1.52, 2.00, 1.26),
    ("GPT3-Large", "2/8", None, 3.25, 3.03), ("GPT3-Large", "2/16", None, 2.88, 1.63),
    ("Qwen3-1.7B+ViT-H", "1/8", 9.73, 8.65, 5.98), ("Qwen3-1.7B+ViT-H", "1/16", 7.80, 6.71, 4.50),
    ("Qwen3-1.7B+ViT-H", "2/8", None, 9.88, 7.66), ("Qwen3-1.7B+ViT-H", "2/16", None, 8.16, 7.07),
    ("Qwen3-4B+ViT-Big", "1/8", 11.38, 10.12, 7.84), ("Qwen3-4B+ViT-Big", "1/16", 10.54, 9.24, 5.02),
    ("Qwen3-4B+ViT-Big", "2/8", None, 6.80, 4.45), ("Qwen3-4B+ViT-Big", "2/16", None, 4.76, 2.94),
    ("LLaMA3-8B+ViT-5B", "1/32", 4.33, 3.42, 3.38), ("LLaMA3-8B+ViT-5B", "2/16", None, 4.40, 3.52),
    ("LLaMA3-8B+ViT-5B", "2/8/2", None, 3.51, 3.02),
    ("Qwen3-32B+InternViT", "1/64", 5.97, 5.51, 4.46), ("Qwen3-32B+InternViT", "2/32", None, 5.67, 5.19),
    ("Qwen3-32B+InternViT", "2/16/2", None, 4.30, 4.06),
    ("LLaMA3-70B+ViT-22B", "2/64", None, 5.52, 5.16), ("LLaMA3-70B+ViT-22B", "2/32/2", None, 5.79, 4.71),
]  # fmt: skip
"""Model, layout, DeepSpeed (None: not run), Cornstarch, RRFP with BF."""

TABLE7 = {"bf": 6.007, "fb": 6.034, "b-first": 6.058, "f-first": 6.303}

TABLE8 = [
    ("depth", "PP", [(Workload("Qwen3-1.7B+ViT-H", p, 192), s) for p, s in ((4, 1.07), (8, 1.94), (16, 2.01))]),
    ("depth", "PP", [(Workload("LLaMA3-8B+ViT-5B", p, 64), s) for p, s in ((8, 1.79), (16, 2.13), (32, 2.31))]),
    ("depth, TP 2", "PP", [(Workload("Qwen3-4B+ViT-Big", p, 64, 2), s) for p, s in ((4, 1.03), (8, 1.64), (16, 1.72))]),
    ("vision tower", "PP 16", [(Workload(f"Qwen3-1.7B+ViT-{v}", 16, 192), s)
                               for v, s in (("L", 1.73), ("H", 1.89), ("g", 2.04), ("Big", 2.16))]),
    ("vision tower", "PP 32", [(Workload(f"LLaMA3-8B+{v}", 32, 64), s)
                               for v, s in (("ViT-5B", 1.32), ("InternViT", 1.43), ("ViT-22B", 1.78))]),
    ("batch", "PP 16", [(Workload("Qwen3-1.7B+ViT-H", 16, b), s) for b, s in ((64, 1.98), (128, 2.14), (192, 2.18))]),
    ("batch", "PP 32", [(Workload("LLaMA3-8B+ViT-5B", 32, b), s) for b, s in ((64, 2.62), (128, 2.72), (192, 2.82))]),
]  # fmt: skip
"""Speed-ups over 1F1B along one axis each. The workload of the batch axis is not named; these two are the candidates."""

JITTER = {
    "J0": ((7.19, 0.339), (4.45, 0.191)),
    "J1": ((7.39, 0.325), (4.53, 0.191)),
    "J2": ((8.00, 0.410), (4.75, 0.210)),
    "J3": ((8.49, 0.390), (4.96, 0.228)),
}
"""1F1B and RRFP under injected jitter: mean, standard deviation."""

FIGURE2 = {"compute": (0.73, 0.35), "communication": (58.74, 50.80)}
"""Worst (p95 - p5) / p50 and (p75 - p25) / p50 over 300 repeats of one job."""

FIGURE5 = {4: 14.7, 8: 10.3, 16: 7.8, 32: 7.75, 48: 7.85}
"""By limit, read off the plot: Qwen3-4B+ViT-Big, batch 192."""

FIGURE6 = {"language": (0.968, 0.84), "multimodal": (0.859, 1.14)}
"""How often the last stage is the forward bottleneck, and the largest p95 of F_i / F_last of another stage."""
