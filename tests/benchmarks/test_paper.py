"""The paper's experiments: what they assume is what they say, and every command runs, at a few microbatches."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.paper import figures, published, repro, tables, training, workloads
from benchmarks.paper.__main__ import SIMULATED, main
from benchmarks.paper.workloads import Variation, Workload

GPT = Workload("GPT3-Large", 8, 64)


@pytest.fixture
def few_microbatches(monkeypatch):
    """Every workload with four microbatches, so that the whole tables take seconds."""
    monkeypatch.setattr(Workload, "microbatches", property(lambda self: 4))
    for cached in (repro.average, repro.calibrate):
        cached.cache_clear()
    yield
    for cached in (repro.average, repro.calibrate):
        cached.cache_clear()


# -- what is published and what is assumed -----------------------------------------------------------------------------


def test_published_speedups_are_the_papers():
    first, best = published.TABLE1[0], published.TABLE2[0]
    assert [round(value, 2) for value in first.speedups] == [1.0, 1.10, 1.43, 1.56]
    assert round(best.speedups[3], 2) == 2.77
    assert len(published.TABLE1) == 12 and len(published.TABLE2) == 8 and len(published.TABLE45) == 20


def test_partition_leaves_the_last_stage_the_busiest(full):
    rows = [row.workload for row in (*published.TABLE1, *published.TABLE2) if full or row.workload.stages <= 16]
    for workload in dict.fromkeys(rows):
        parts = workload.partition
        assert len(parts) == workload.stages and min(parts) >= 1 and sum(parts) == len(workload.layers)
        work = workloads._stage_operations(workload, workloads.MEAN_IMAGES)
        assert max(work[:-1]) <= workloads.BUSIEST_OTHER * work[-1]


def test_even_finds_the_best_cuts():
    assert workloads._even([1.0] * 8, 4) == [2, 2, 2, 2]
    parts = workloads._even([3.0, 1.0, 1.0, 1.0, 3.0], 3)
    assert parts == [1, 3, 1]


def test_shapes_have_their_published_sizes():
    billions = {name: shape.layers * shape.parameters / 1e9 for name, shape in (workloads.LANGUAGE | workloads.VISION).items()}
    # Without embeddings, norms and biases.
    expected = {"GPT3-Large": 0.68, "Qwen3-1.7B": 1.4, "Qwen3-4B": 3.6, "Qwen3-32B": 31.2, "LLaMA3-8B": 7.0, "LLaMA3-70B": 68.5,
                "ViT-L": 0.30, "ViT-H": 0.63, "ViT-g": 1.0, "ViT-Big": 1.84, "ViT-5B": 5.0, "InternViT": 5.5, "ViT-22B": 21.7}
    assert billions == pytest.approx(expected, rel=0.03)


def test_costs_are_drawn_from_the_seed():
    one, same, other = (GPT.costs(0.01, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert all(one.durations["B", s, m] == one.durations["I", s, m] + one.durations["W", s, m] for s in range(8) for m in range(64))
    last = sum(one.durations["F", 7, m] for m in range(64)) / 64
    assert last == pytest.approx(0.01, rel=0.06)
    late = sum(delay > 0.6e-3 for delay in one.delays.values()) / len(one.delays)
    assert late == pytest.approx(Variation().late, abs=0.06)


def test_more_images_cost_more_where_the_vision_tower_is():
    workload = Workload("Qwen3-4B+ViT-Big", 8, 8)
    none, many = (workload.costs(1.0, 0, variation=Variation(images=(count,))) for count in (1, 8))
    growth = [many.durations["F", s, 0] / none.durations["F", s, 0] for s in (0, 7)]
    assert growth[0] > 5 and 1 < growth[1] < 3


def test_calibration_hits_its_number():
    seconds = repro.average(GPT, repro.MEGATRON, repro.calibrate(GPT, repro.MEGATRON, 3.28), seeds=1).seconds
    assert seconds == pytest.approx(3.28, rel=0.01)


def test_ladder_multiplies_to_the_total():
    workload = Workload("GPT3-Large", 8, 16)
    steps = repro.ladder(workload, 0.01, seeds=1)
    total = (repro.average(workload, repro.MEGATRON, 0.01, seeds=1).seconds
             / repro.average(workload, repro.PAPER["RRFP+BFW"], 0.01, seeds=1).seconds)
    assert math.prod(factor for _, _, factor, _ in steps) == pytest.approx(total)
    assert math.prod(factor for _, _, factor, _ in steps[:-2]) != pytest.approx(total)  # negative control
    assert max(peak for _, _, _, peak in steps) == 16  # no more than microbatches


def test_injection_lengthens_and_j0_does_not():
    costs = Workload("Qwen3-4B+ViT-Big", 8, 8).costs(0.02, 0)
    assert tables.inject(costs, "J0", 0) == costs
    more = tables.inject(costs, "J3", 0)
    assert more == tables.inject(costs, "J3", 0)
    work, base = (sum(value for (kind, _, _), value in c.durations.items() if kind in "FB") for c in (more, costs))
    assert 1.15 < work / base < 2
    split = sum(value for (kind, _, _), value in more.durations.items() if kind in "FIW")
    assert split == pytest.approx(work)


def test_theorem_holds_for_bf():
    real, bound, ideal = figures._theorem(Workload("GPT3-Large", 8, 12).costs(1.0, 0))
    assert ideal <= real * (1 + 1e-9) <= bound * (1 + 2e-9)


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_command_prints_its_table(name, few_microbatches, monkeypatch, capsys, full):
    if not full:
        for attribute in ("TABLE1", "TABLE2"):
            monkeypatch.setattr(published, attribute, [row for row in getattr(published, attribute) if row.workload.stages <= 32][:10])
        monkeypatch.setattr(published, "TABLE2", published.TABLE2[:4])
        monkeypatch.setattr(published, "TABLE8", published.TABLE8[:1])
    assert main([name, "--count", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) >= 4 and len(max(lines, key=len)) > 40
    assert "nan" not in "".join(rows)


def test_figure2_measures_real_processes(capsys, monkeypatch):
    figures.figure2(3, stages=2, microbatches=3, forward=0.001)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "processes" in line]
    assert len(rows) == 4


EMULATED = """
from benchmarks.paper import repro
from benchmarks.paper.emulated import Case, emulated
from benchmarks.paper.workloads import Workload
emulated(1, cases=(Case(Workload("GPT3-Large", 2, 3), 1),), modes=%r, last_stage=0.002)
"""


def test_emulated_runs_real_processes(full):
    # In a process of its own: CPU mode has to come before the first import of megatron, which other tests may have done here.
    modes = (repro.CONTROL, "ready:fill-alt:2p", "ready:fill-r:2p-1", *((repro.MEGATRON,) if full else ()))
    done = subprocess.run([sys.executable, "-c", EMULATED % (modes,)], cwd=training.ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(mode in done.stdout for mode in modes) and "actions took noticeably longer" in done.stdout


LOG = """ iteration 1/ 2 | lm loss: 5.5E+00 | grad norm: 1.0 |
 validation loss at iteration 1 | lm loss value: 5.4E+00 | lm loss PPL: 2.2E+02 |
 iteration 2/ 2 | lm loss: 5.25E+00 | grad norm: 0.9 |""".splitlines()


def test_logs_are_compared_digit_for_digit():
    assert training.losses(LOG) == [5.5, 5.25] and training.evaluations(LOG) == [5.4]
    assert training.different(LOG, LOG) == []
    other = LOG[2].replace("5.25", "5.250001")
    assert training.different(LOG, [LOG[0], LOG[1], other]) == [(LOG[2], other)]
    assert training.different(LOG, LOG[:2]) == [(LOG[2], None)]


@pytest.mark.timeout(600)
def test_appendix_e_trains_bitwise_equal(full, tmp_path, capsys):
    if not full:
        pytest.skip("starts whole trainings: --all")
    picture = tmp_path / "losses.png"
    assert training.appendix_e(seeds=(42,), stages=2, iterations=10, picture=picture, deadline=250) == 0
    assert picture.stat().st_size > 5000 and "reference" in capsys.readouterr().out
