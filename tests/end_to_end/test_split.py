"""Whole trainings with `--rrfp-split-backward`, by unmodified scripts: their logs are Megatron's, digit for digit."""

import os
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import pretrain_gpt_job as job  # noqa: E402
from pretrain_gpt_job import Trainings  # noqa: E402

from rrfp.trace.files import read  # noqa: E402

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SPLIT = ["--rrfp-split-backward", "--rrfp-hint", "bfw", "--rrfp-limit", "2p"]
KINDS = {
    "plain": [], "untied": ["--untie-embeddings-and-output-weights"],
    "recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
    "bf16": ["--bf16"], "distributed": ["--use-distributed-optimizer", "--overlap-grad-reduce"],
    "chunks": "--num-layers-per-virtual-pipeline-stage 1 --hidden-dropout 0 --attention-dropout 0".split(),
}


@pytest.fixture(scope="module")
def data() -> list[str]:
    return [*job.make_data(), "--train-iters", "3"]


def trees() -> list:
    """The newest checkout first; the package's own script where there is none."""
    return job.trees() or [None]


@pytest.mark.parametrize("tree", trees(), ids=lambda tree: "own script" if tree is None else tree.name)
def test_the_log_is_megatrons_digit_for_digit(tree, data, tmp_path, full):
    """Two ranks: evaluation between the steps and a trace; under --all other models and reductions, and every release."""
    newest = tree == trees()[0]
    if not newest and not full:
        pytest.skip("only with --all: the newest release is tested")
    script = job.OWN_SCRIPT if tree is None else job.ready_tree(tree) / "pretrain_gpt.py"
    server = Trainings(script, data)
    for kind in KINDS if full and newest else ["untied"]:
        arguments = [*KINDS[kind], "--eval-interval", "2", "--eval-iters", "1"]
        ranks, layout = (4, {"pipeline": 2}) if kind == "distributed" else (2, {})
        theirs = server.run("megatron", tmp_path / kind / "megatron", *arguments, ranks=ranks, **layout)
        arguments += [*SPLIT, "--rrfp-trace", str(tmp_path / kind / "trace")]
        ours = server.run("rrfp", tmp_path / kind / "rrfp", *arguments, ranks=ranks, **layout)
        assert ours.log == theirs.log and len(ours.log) >= 3, kind
        assert "[rrfp] stage 0 (rank 0): split backward: W computes " in ours.text or kind == "chunks"
        folder = tmp_path / kind / "trace"
        timeline = read(folder / "pipeline0" if ranks == 4 else folder)
        chunks = 2 if kind == "chunks" else 1
        trained = [part for part in timeline.breakdowns() if not part.forward_only]
        assert len(trained) == 2 * 3
        for part in trained:
            assert part.counts == {action: chunks * part.microbatches for action in "FIW"}
    if newest:
        reports_it(folder, tmp_path)


def reports_it(trace, tmp_path) -> None:
    """What reads traces takes I and W."""
    from rrfp.cli import main

    assert main(["trace", str(trace)]) == 0
    assert main(["report", str(trace), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["simulate", "--trace", str(trace), "--modes", "ready:bfw:2p", "ready:announced"]) == 0
