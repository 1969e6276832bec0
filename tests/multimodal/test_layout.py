"""Which layers each stage has: the notation, what is refused, the balanced layout, and what the stages cost."""

from dataclasses import replace

import pytest

from rrfp.balance.arguments import read_model
from rrfp.balance.shapes import Attention, Feedforward, Shape
from rrfp.balance.table import balance
from rrfp.errors import ConfigurationError
from rrfp.multimodal.costs import Load, Model, Tower, balanced_layout, stage_operations
from rrfp.multimodal.layout import Layout, balanced, embedding_ranks, parse

VIT = Shape(hidden=16, attention=Attention(heads=2, groups=2, head=8, causal=False), feedforward=Feedforward(width=64))
LLM = Shape(hidden=32, attention=Attention(heads=4, groups=2, head=8), feedforward=Feedforward(width=48, gated=True))
MODEL = Model(vit=Tower(4, VIT), llm=Tower(6, LLM), vocabulary=128, patch=12)


@pytest.mark.parametrize("text, vit, llm, tokens, megatron", [
    ("vv|vv|ttt|ttt", (2, 2, 0, 0), (0, 0, 3, 3), 2, ("Ett|ttL||", "||Ettt|tttL")),
    ("vt", (1,), (1,), 0, ("EtL", "EtL")),
    ("v|vvt|t", (1, 2, 0), (0, 1, 1), 1, ("Et|ttL|", "|Et|tL")),
    ("v|E|tt|L", (1, 0, 0, 0), (0, 0, 2, 0), 1, ("EtL|||", "|E|tt|L")),
    ("(v|)*3 t*2, | ttL", (1, 1, 1, 0, 0), (0, 0, 0, 2, 2), 3, ("Et|t|tL||", "|||Ett|ttL")),
])
def test_a_layout_is_read_printed_and_told_to_megatron(text, vit, llm, tokens, megatron):
    layout = parse(text)
    assert layout == Layout(vit, llm, tokens) == parse(str(layout))
    assert (layout.megatron("vit"), layout.megatron("llm")) == megatron


@pytest.mark.parametrize("text, words", [
    ("v|t|v", "first the layers of the ViT"),
    ("|v|t", "starts on stage 0"),
    ("v||v|t", "skips none"),
    ("v||t", "follows the last v"),
    ("v|x", "'x' is neither"),
    ("v|t||t", "stage 2 has nothing to do"),
    ("tt|tt", "needs layers of the ViT"),
    ("v|EL", "of the LLM"),
    ("v|tL|", "L belongs to the last stage"),
    ("", "needs layers"),
])
def test_what_is_no_vit_followed_by_an_llm_is_refused(text, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        parse(text)
    assert "--vlm-layout" in str(error.value) and "\n" not in str(error.value)


def test_a_layout_must_be_the_models():
    with pytest.raises(ConfigurationError, match="3 stages, no multiple of --pipeline-model-parallel-size 2"):
        parse("v|t|t", ranks=2)
    with pytest.raises(ConfigurationError, match="has 2 layers v, but --vit-num-layers is 3"):
        parse("vv|t", vit_layers=3)
    with pytest.raises(ConfigurationError, match="has 1 layers t, but --num-layers is 2"):
        parse("vv|t", llm_layers=2)


def test_the_balanced_layout_has_the_cheapest_costliest_stage():
    """Against every layout there is."""
    for stages in (1, 2, 3, 4):
        for costs in ((1.0, 1.0, 0.0), (1.0, 3.0, 2.0), (5.0, 1.0, 1.0)):
            vit, llm, head = costs

            def worst(layout):
                per_stage = [v * vit + t * llm for v, t in zip(layout.vit, layout.llm, strict=True)]
                return max([*per_stage[:-1], per_stage[-1] + head])

            best = min(worst(layout) for layout in every_layout(stages, 3, 4))
            found = balanced(stages=stages, vit=[vit] * 3, llm=[llm] * 3 + [llm + head])
            assert worst(found) == best, (stages, costs, str(found))
    with pytest.raises(ConfigurationError, match="can't fill 8 stages"):
        balanced(stages=8, vit=[1.0] * 3, llm=[1.0] * 4)


def every_layout(stages, vit_layers, llm_layers):
    layers = "v" * vit_layers + "t" * llm_layers

    def cut(rest, parts):
        if parts == 1:
            yield [rest]
            return
        for size in range(1, len(rest) - parts + 2):
            for tail in cut(rest[size:], parts - 1):
                yield [rest[:size], *tail]

    return [parse("|".join(rows)) for rows in cut(layers, stages)]


def test_embeddings_are_where_tokens_enter_and_on_the_last_rank():
    assert embedding_ranks(parse("v|v|t|t"), [3, 5, 7, 9]) == [7, 9]
    assert embedding_ranks(parse("v|v|v|t"), [0, 1, 2, 3]) == [3]
    assert embedding_ranks(parse("v|v|t|t"), [4, 6]) == [4, 6], "two chunks: stage 2 is the first rank's"


def test_stages_cost_what_the_whole_costs():
    load = Load((4, 9), (20,))
    for text in ("vvvvtttttt", "vv|vv|ttt|ttt", "v|vvv|E|ttt|ttt|L"):
        layout = parse(text)
        assert sum(stage_operations(MODEL, layout, load)) == pytest.approx(sum(stage_operations(MODEL, parse("vvvvtttttt"), load)))
    # A layer by hand: queries and output 2 * 32 * 32, keys and values 2 * 32 * 16, three matrices of 32 * 48.
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert MODEL.llm.layer_operations([10]) == 2 * weights * 10 + 2 * 32 * 100


def test_where_all_images_are_alike_stages_cost_what_rrfp_balance_says():
    arguments = ("--num-layers 6 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 48 --swiglu "
                 "--seq-length 20 --vocab-size 128 --max-position-embeddings 20 --vit-num-layers 4 --vit-hidden-size 16 --vit-num-attention-heads 2 "
                 "--vit-patch 2 --vit-channels 3 --vit-grid 3 --pipeline-model-parallel-size 4 --vlm-layout vv|vvt|tt|ttt").split()
    rows = balance(read_model(arguments, images=(2,))).rows
    ours = stage_operations(MODEL, parse("vv|vvt|tt|ttt"), Load((9, 9), (20 + 2 * 9,)))
    assert ours == pytest.approx([row.operations["2 images"] for row in rows])


def test_the_patch_embedding_and_the_projector_count_when_stages_are_cut():
    """Against every layout there is, by what all of a stage costs; with both made heavy, so that leaving one out would show."""
    load = Load((9,) * 4, (40,))
    for model in (MODEL, replace(MODEL, patch=4000), replace(MODEL, llm=replace(MODEL.llm, shape=replace(LLM, hidden=512)))):
        for stages in (2, 3, 4, 5):
            best = min(max(stage_operations(model, layout, load)) for layout in every_layout(stages, 4, 6))
            assert max(stage_operations(model, balanced_layout(model, stages, load), load)) == pytest.approx(best)
    # The negative control: a heavy embedding leaves its stage fewer layers than a light one does.
    light, heavy = (balanced_layout(replace(MODEL, patch=patch), 3, load) for patch in (12, 4000))
    assert heavy.vit[0] < light.vit[0]


def test_all_layers_together_cost_what_the_stages_do():
    load = Load((4, 9), (20,))
    assert sum(map(sum, MODEL.layers_operations(load))) == pytest.approx(sum(stage_operations(MODEL, parse("vv|vv|ttt|ttt"), load)))


def test_text_alone_costs_nothing_on_the_vit():
    costs = stage_operations(MODEL, parse("vv|vv|ttt|ttt"), Load((), (20,)))
    assert costs[:2] == [0, 0] and min(costs[2:]) > 0


def test_more_images_move_the_balance():
    few, many = (balanced_layout(MODEL, 4, Load((4,) * count, (40,))) for count in (1, 400))
    assert few.patches_end < many.patches_end
