"""The flags of scripts/pretrain_vlm.py: the balanced layout, and what is refused."""

import argparse

import pytest

from rrfp.errors import ConfigurationError
from rrfp.multimodal.arguments import add_arguments, check, check_given, layout_of, with_layout
from rrfp.multimodal.freezing import is_frozen, matched
from rrfp.multimodal.layout import parse

SIZES = ("--vit-num-layers 4 --vit-hidden-size 16 --vit-num-attention-heads 2 --num-layers 4 --hidden-size 16 --num-attention-heads 2 "
         "--seq-length 8").split()


def validated(layout: str = "vv|vv|tt|tt", **changes) -> argparse.Namespace:
    """Arguments as Megatron validates them, as far as they are looked at here."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--vlm-layout", layout, *SIZES[:6]])
    values = dict(pipeline_model_parallel_size=4, num_layers=4, context_parallel_size=1, num_experts=None, mtp_num_layers=None,
                  rampup_batch_size=None, dataloader_type="external", untie_embeddings_and_output_weights=False, padded_vocab_size=384)
    vars(args).update(values | changes)
    return args


def test_a_layout_is_told_to_megatron_while_it_parses():
    assert validated().pipeline_model_parallel_layout == "||Ett|ttL"


def test_the_balanced_layout_is_added_and_a_given_one_kept():
    argv = [*SIZES, "--pipeline-model-parallel-size", "4"]
    *before, option, text = with_layout(argv)
    assert before == argv and option == "--vlm-layout" and parse(text, ranks=4, vit_layers=4, llm_layers=4)
    for given in (["--vlm-layout", "vv|vv|tt|tt"], ["--vlm-layout=vv|vv|tt|tt"]):
        assert with_layout([*argv, *given]) == [*argv, *given]
    with pytest.raises(ConfigurationError, match="3 stages, no multiple"):
        with_layout([*argv, "--vlm-layout", "v|v|t"])
    with pytest.raises(ConfigurationError, match="can't fill 16 stages"):
        with_layout([*SIZES, "--pipeline-model-parallel-size", "16"])
    for tower in ("--vit-num-layers", "--num-layers"):
        with pytest.raises(ConfigurationError, match="needs layers of the ViT"):
            with_layout([*argv, tower, "0"])


@pytest.mark.parametrize("words, refusal", [
    ("--vlm-data=/nonexistent", "--vlm-data /nonexistent: is neither digits, digits-blank nor a folder"),
    ("--freeze vit all --lr 1", "--freeze vit all: leaves nothing to train; take something out with --unfreeze"),
    ("--freeze all --unfreeze [", r"--unfreeze \[: is no regular expression"),
])
def test_what_is_refused_before_anything_starts(words, refusal):
    with pytest.raises(ConfigurationError, match=refusal) as error:
        check_given([*SIZES, *words.split()])
    assert "\n" not in str(error.value)


def test_what_is_right_passes_before_anything_starts(tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    for words in ("--freeze vit projector", "--freeze all --unfreeze layernorm", f"--vlm-data {tmp_path}", "--vlm-data digits-blank", ""):
        check_given([*SIZES, *words.split()])


def test_the_image_token_is_the_last_id_of_the_vocabulary():
    args = validated()
    check(args)
    assert args.image_token_id == 383 and layout_of(args) == parse("vv|vv|tt|tt")


@pytest.mark.parametrize("changes, words", [
    ({"context_parallel_size": 2}, "--context-parallel-size 2 with a ViT"),
    ({"num_experts": 4}, "--num-experts 4"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers"),
    ({"dataloader_type": "single"}, "--dataloader-type single"),
    ({"vlm_feed": "by-size", "rampup_batch_size": ["2", "2", "4"]}, "--vlm-feed by-size"),
    ({"image_token_id": 384}, "--image-token-id 384: the padded vocabulary has 384"),
    ({"pipeline_model_parallel_size": 2}, "use --untie-embeddings-and-output-weights"),
    ({"num_layers": 5}, "has 4 layers t, but --num-layers is 5"),
])
def test_what_it_can_t_run_with_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigurationError) as error:
        check(validated(**changes))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_two_chunks_are_fine_with_untied_embeddings():
    check(validated(pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=True))


# ------------------------------------------------------------------------------------------------- what is frozen
NAMES = ["vision.patch_embedding.weight", "vision.decoder.layers.3.mlp.linear_fc1.weight", "vision.projector.encoder.linear_fc1.weight",
         "language.embedding.word_embeddings.weight", "language.decoder.layers.3.input_layernorm.weight"]


@pytest.mark.parametrize("patterns, but, frozen", [
    ([], [], "....."), (["vit"], [], "xx..."), (["projector"], [], "..x.."), (["llm"], [], "...xx"), (["all"], ["layernorm"], "xxxx."),
    ([r"layers\.3\."], ["llm"], ".x..."), (["vit", "linear_fc1"], [], "xxx.."),
])
def test_names_and_expressions_say_what_is_frozen(patterns, but, frozen):
    assert "".join(".x"[is_frozen(name, patterns, but=but)] for name in NAMES) == frozen


def test_what_means_no_parameter_is_found():
    assert matched(NAMES, ["vit", "vits", r"layers\.3\.", "all"], option="--freeze") == [True, False, True, True]


def test_what_is_no_expression_is_refused():
    with pytest.raises(ConfigurationError, match="--unfreeze [(]: is no regular expression"):
        is_frozen("x", ["all"], but=["("])
