"""Whole trainings of ViT + LLM by readiness, and the same under Megatron untouched apart from CPU mode: equal digit for digit.

scripts/pretrain_vlm.py with the ViT over several stages; Megatron's own pretrain_vlm.py (LLaVA), unmodified, from the newest checkout at
MEGATRON_LM.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import pretrain_gpt_job as job  # noqa: E402
from job import ROOT  # noqa: E402
from pretrain_gpt_job import Trainings, value  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
SCRIPT = ROOT / "scripts/pretrain_vlm.py"
TINY = (ROOT / "scripts/tiny_vlm.args").read_text().split()
TRAINING = "--train-iters 4 --eval-interval 2 --eval-iters 1 --global-batch-size 8".split()
LLAVA = """
    --encoder-num-layers 2 --decoder-num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64
    --img-h 28 --img-w 28 --patch-dim 14 --dataloader-seq-length 32 --decoder-seq-length 64 --ckpt-format torch --position-embedding-type rope
    --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer
    --vocab-size 127 --split 90,5,5 --transformer-impl local --attention-backend unfused --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --eval-interval 2
    --eval-iters 1 --log-interval 1 --num-workers 0
""".split()


def vlm(layout: str, *arguments: str) -> list[str]:
    return ["--vlm-layout", layout, *TRAINING, *arguments]


@pytest.fixture(scope="module")
def server():
    return Trainings(SCRIPT, TINY)


KINDS = {
    "PP4-saved": (4, "vv|vv|tt|tt", ["--save-interval", "2", "--ckpt-format", "torch_dist"],
                  ["--rrfp-hint", "rrfp.multimodal.hint:known_costs", "--rrfp-limit", "2p"]),
    "PP2-frozen-by-size": (2, "vvvv|tttt", "--freeze vit projector --micro-batch-size 2 --vlm-feed by-size".split(), []),
}


@pytest.mark.parametrize("ranks, layout, arguments, ours", KINDS.values(), ids=KINDS)
def test_log_and_checkpoints_are_those_of_megatron(server, tmp_path, full, ranks, layout, arguments, ours):
    runs, saves = {}, "--save-interval" in arguments
    for way in ("megatron", "rrfp"):
        more = (["--save", str(tmp_path / way / "saved")] if saves else []) + (ours if way == "rrfp" else [])
        runs[way] = server.run(way, tmp_path / way, *vlm(layout, *arguments), *more, ranks=ranks)
    theirs, ours = runs["megatron"], runs["rrfp"]
    assert "[rrfp]" not in theirs.text and "[rrfp] hint" in ours.text
    assert ours.log == theirs.log
    # Controls: all is there, and it changes.
    losses = [value(line, "lm loss") for line in ours.log if line.startswith("iteration")]
    assert len(set(losses)) == 4 and losses[-1] < losses[0]
    assert any("right captions value:" in line for line in ours.log)
    assert ("[rrfp] stage 0 is frozen" in ours.text) == ("--freeze" in arguments)
    if saves:
        assert job.different(*(tmp_path / way / "saved/iter_0000004" for way in runs)) == []
        assert job.different(*(tmp_path / "rrfp/saved" / name for name in ("iter_0000002", "iter_0000004"))) != []
    if saves and full:
        resumed = server.run("rrfp", tmp_path / "resumed", *vlm(layout, *arguments), "--load", str(tmp_path / "megatron/saved"), "--ckpt-step", "2",
                             "--save", str(tmp_path / "resumed/saved"), ranks=ranks)
        assert [line for line in resumed.log if line.startswith("iteration")][0] == [line for line in ours.log if line.startswith("iteration")][2]
        assert job.different(tmp_path / "rrfp/saved/iter_0000004", tmp_path / "resumed/saved/iter_0000004") == []


@pytest.mark.parametrize("layout, more, refusal", [
    ("vv|vv|tttt", [], "has 3 stages, no multiple of --pipeline-model-parallel-size 2"),
    ("vvvv|tttt", ["--freeze", "vit", "language.decodr"], "--freeze language.decodr: means no parameter; give vit, projector, llm, all, or"),
    ("vvvv|tttt", ["--freeze", "vision", "^l"], "--freeze vision ^l: leaves nothing to train; take something out with --unfreeze, or freeze less"),
], ids=["layout", "freeze", "nothing-trains"])
def test_a_refusal_is_one_line(server, tmp_path, layout, more, refusal):
    run = server.run("rrfp", tmp_path, *vlm(layout, *more), ranks=2, codes=[2, 2])
    (line,) = [line for line in run.outputs[0].splitlines() if line.startswith("rrfp: ")]
    assert refusal in line


# ------------------------------------------------------------------------------------------------- Megatron's own LLaVA
@pytest.fixture(scope="module")
def llava():
    trees = [tree for tree in job.trees() if (tree / "pretrain_vlm.py").is_file()]
    if not trees:
        pytest.skip("MEGATRON_LM=DIR names no Megatron-LM checkout with pretrain_vlm.py")
    return Trainings(job.ready_tree(trees[0]) / "pretrain_vlm.py", LLAVA)


@pytest.mark.parametrize("ranks", [2, 4])
def test_megatrons_own_llava_logs_the_same(llava, tmp_path, ranks):
    theirs, ours = (llava.run(way, tmp_path / way, ranks=ranks) for way in ("megatron", "rrfp"))
    assert "[rrfp] hint" in ours.text and "[rrfp]" not in theirs.text
    assert ours.log == theirs.log
    losses = [value(line, "lm loss") for line in ours.log if line.startswith("iteration")]
    assert len(set(losses)) == 3
