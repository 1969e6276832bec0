"""`rrfp balance`: its counts are those of the models that Megatron builds, and of published models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp import cli
from rrfp.balance.arguments import read_model
from rrfp.balance.command import main
from rrfp.balance.layout import best_cuts, even_layout, parse_layout, unroll, write_layout
from rrfp.balance.table import balance
from rrfp.errors import ConfigurationError

TINY = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 100 --micro-batch-size 2"
        " --global-batch-size 8").split()
QWEN = ("--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --group-query-attention --num-query-groups 2"
        " --kv-channels 24 --qk-layernorm --ffn-hidden-size 160").split()
P2, P4, T2 = ["--pipeline-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "4"], ["--tensor-model-parallel-size", "2"]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-load-balancing-type none".split()
CASES = {
    "alone": [],
    "plain": P4,
    "tensor": [*P2, *T2],
    "qwen": [*P2, *QWEN],
    "qwen, tensor": [*P2, *T2, *QWEN],
    "untied": [*P2, *QWEN, "--untie-embeddings-and-output-weights"],
    "bias of qkv": [*P2, "--disable-bias-linear", "--add-qkv-bias", "--swiglu"],
    "chunks": [*P2, "--num-layers-per-virtual-pipeline-stage", "1"],
    "uneven": [*P2, "--decoder-first-pipeline-num-layers", "1"],
    "accounted for": [*P2, "--num-layers", "6", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
    "layout": [*P2, "--pipeline-model-parallel-layout", "E|t*3|(t|)*1L"],
    "experts": [*P2, *EXPERTS, "--moe-layer-freq", "2"],
    "experts, spread": [*P2, *EXPERTS, *QWEN, "--expert-model-parallel-size", "2", "--moe-shared-expert-intermediate-size", "40"],
}
VIT = ("--vit-num-layers 3 --vit-hidden-size 48 --vit-num-attention-heads 4 --vit-grid 6 --vit-patch 4 --vit-channels 1"
       " --calculate-per-token-loss").split()
SEEING = {
    "seeing": [*P4, *VIT, "--vlm-layout", "vv|vt|tt|t"],
    "seeing, tensor": [*P2, *T2, *QWEN, *VIT, "--vit-ffn-hidden-size", "100", "--vlm-layout", "v*3|t*4"],
    "seeing, output alone": [*P4, *VIT, "--untie-embeddings-and-output-weights", "--vlm-layout", "vv|v|Et*4|L"],
    "seeing, balanced": [*P2, *VIT],
}
"""A ViT before the LLM."""
if importlib.util.find_spec("rrfp.multimodal"):
    CASES |= SEEING
pytestmark = pytest.mark.timeout(450)  # one process builds all cases before the first test
REDUCED = ("plain", "tensor", "qwen, tensor", "untied", "bias of qkv", "chunks", "accounted for", "layout", "experts", "experts, spread",
           "seeing, tensor", "seeing, output alone")


@pytest.fixture(scope="module")
def built(full):
    """For each case, what Megatron builds and says: {name: {"ranks", "operations"}}."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    names = [name for name in CASES if full or name in REDUCED]
    script = Path(__file__).with_name("count_parameters.py")
    cases = json.dumps([_with_layout([*TINY, *CASES[name]]) for name in names])
    done = subprocess.run(
        [sys.executable, str(script)], input=cases, capture_output=True, text=True, timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))


def _with_layout(argv: list[str]) -> list[str]:
    """What scripts/pretrain_vlm.py does to its command line."""
    if "--vit-num-layers" not in argv:
        return argv
    from rrfp.multimodal.arguments import with_layout

    return with_layout(argv)


def test_every_rank_holds_what_megatron_builds(built):
    for name, found in built.items():
        model = read_model([*TINY, *CASES[name]])
        ours = {rank: [row.per_rank for row in balance(model).rows if row.rank == rank] for rank in range(model.ranks)}
        assert ours == {int(rank): counts for rank, counts in found["ranks"].items()}, name


def test_operations_are_those_that_megatron_reports(built):
    for name, found in built.items():
        ours = balance(read_model([*TINY, *CASES[name]])).operations
        if name in SEEING:  # Megatron's formula knows no images
            continue
        assert ours == pytest.approx(found["operations"]), name


def test_a_wrong_width_is_noticed(built):
    """Negative control: one head group more, one layer elsewhere."""
    other = read_model([*TINY, *CASES["qwen, tensor"], "--num-query-groups", "4"])
    assert [row.per_rank for row in balance(other).rows] != [counts[0] for counts in built["qwen, tensor"]["ranks"].values()]
    other = read_model([*TINY, *CASES["layout"][:-1], "E|t*2|t*2|L"])
    assert [row.per_rank for row in balance(other).rows if row.rank == 1] != built["layout"]["ranks"]["1"]


# ------------------------------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("text", ["Et*3|(tt|)*2t|L", "E,t|(t|)*3,L", "(E|)*1t*2|t*2L", "Ettt|(t*4|)*3,t|L", "E|t*2|*2L"])
def test_layouts_are_read_as_megatron_reads_them(text):
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    assert unroll(text) == ["".join(letters[part.name] for part in stage) for stage in layout.parse_str_to_list(text)]


def test_a_written_layout_is_read_as_the_same(seed):
    import random

    rng = random.Random(seed)
    for _ in range(200):
        stages = ["".join(rng.choices("Ettv", k=rng.choice((0, 1, 1, 2, 2, 5)))) for _ in range(rng.randint(1, 9))]
        stages = [stage for stage in stages for _ in range(rng.choice((1, 1, 4)))]
        assert unroll(write_layout(stages)) == stages, write_layout(stages)


def test_without_a_layout_layers_are_spread_as_megatron_does():
    assert even_layout(8, ranks=4) == ["Ett", "tt", "tt", "ttL"]
    assert even_layout(8, ranks=2, chunks=2) == ["Ett", "tt", "tt", "ttL"]
    assert even_layout(7, ranks=4, first=1) == ["Et", "tt", "tt", "ttL"]
    assert even_layout(6, ranks=4, embedding=True, loss=True) == ["Et", "tt", "tt", "tL"]
    assert even_layout(3, ranks=1) == ["EtttL"]


def test_best_cuts_are_the_best_of_all(seed):
    import random
    from itertools import combinations

    rng = random.Random(seed)
    for _ in range(20):
        weights, parts = [rng.randint(0, 9) for _ in range(7)], rng.randint(1, 7)
        cuts = best_cuts(weights, parts)
        assert len(cuts) == parts and sum(cuts) == 7 and min(cuts) > 0

        def heaviest(ends):
            return max(sum(weights[low:high]) for low, high in zip((0, *ends), (*ends, 7), strict=True))

        ends = tuple(sum(cuts[:index]) for index in range(1, parts))
        assert heaviest(ends) == min(heaviest(other) for other in combinations(range(1, 7), parts - 1))


# ------------------------------------------------------------------------------------------------------------- command
def test_the_command(tmp_path, capsys):
    path = tmp_path / "balance.json"
    assert cli.main(["balance", *TINY, *P4, "--json", str(path), "--lr", "1e-4"]) == 0
    out, whole = capsys.readouterr().out, json.loads(path.read_text())
    assert "busiest: stage 3 with" in out and "E t" in out and "4.096 k in the last stage's copy" in out.replace("8.192", "4.096")
    assert len(whole["stages"]) == 4 and sum(stage["share"] for stage in whole["stages"]) == pytest.approx(4)
    assert whole["flop_per_iteration"] == pytest.approx(3 * 4 * sum(stage["forward_flop"] for stage in whole["stages"]))


def test_a_suggested_layout_is_no_worse_and_is_one_of_megatrons(capsys):
    assert main([*TINY, "--num-layers", "11", *P4, "--suggest"]) == 0
    layout = capsys.readouterr().out.split("--pipeline-model-parallel-layout ")[1].strip().strip("'")
    chosen = balance(read_model([*TINY, "--num-layers", "11", *P4, "--pipeline-model-parallel-layout", layout]))
    by_hand = balance(read_model([*TINY, "--num-layers", "11", *P4, "--pipeline-model-parallel-layout", "Ettt|ttt|ttt|ttL"]))
    assert chosen.busiest.share <= by_hand.busiest.share


def test_chunks_are_named_with_their_ranks(capsys):
    assert main([*TINY, *CASES["chunks"]]) == 0
    assert "stage  rank" in capsys.readouterr().out and len(read_model([*TINY, *CASES["chunks"]]).stages) == 4


@pytest.mark.parametrize(("arguments", "says"), [
    (["--hidden-size", "many"], "--hidden-size: invalid int value"),
    (["--num-layers", "0"], "--num-layers 0: must be at least 1"),
    (["--num-attention-heads", "7"], "--num-attention-heads 7: does not divide --hidden-size 64"),
    (["--pipeline-model-parallel-size", "3"], "--num-layers 4: can't be divided over --pipeline-model-parallel-size 3"),
    ([*P4, "--pipeline-model-parallel-layout", "Ett|ttL"], "no multiple of --pipeline-model-parallel-size 4"),
    ([*P2, "--pipeline-model-parallel-layout", "Ett|tL"], "holds 't' 3 times; the model has 4"),
    ([*P2, "--pipeline-model-parallel-layout", "Ett|tmtL"], "'m' is no part of this model"),
    (["--multi-latent-attention"], "--multi-latent-attention: its layers are not counted here"),
    (["--num-experts", "4", "--moe-layer-freq", "([0]*1)"], "--moe-layer-freq ([0]*1): must be a number, or a list of 4 zeros and ones"),
    (["--num-experts", "4", "--moe-layer-freq", "exit()"], "--moe-layer-freq exit(): must be"),
    (["--images", "2"], "--images: these arguments have no vision tower (--vit-num-layers); leave it out"),
    (["--suggest", "--pipeline-model-parallel-size", "9"], "layers can't fill 9 stages"),
])
def test_refusals(arguments, says):
    with pytest.raises(ConfigurationError) as refusal:
        main([*TINY, *arguments])
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_is_missing_is_named():
    with pytest.raises(ConfigurationError, match="--num-layers: is missing"):
        read_model(["--hidden-size", "64"])
    with pytest.raises(ConfigurationError, match="--vocab-size: is missing"):
        read_model([word for word in TINY if word not in ("--vocab-size", "100")])


def test_a_layout_has_every_part_once():
    with pytest.raises(ConfigurationError, match="holds 'L' 2 times"):
        parse_layout("Et|tLL", ranks=2, counts={"E": 1, "t": 2, "L": 1})
