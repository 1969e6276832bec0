"""The split backward (I and W): losses, every gradient and the weights bitwise those of Megatron's own schedule on ordinary layers."""

import contextlib
import itertools
from pathlib import Path

import pytest
from group import Group

from rrfp.trace.files import read

SCRIPT = "split_jobs.py"
BFW = {"hint": "bfw", "limit": "2p"}


@pytest.fixture(scope="module")
def two():
    with Group(2, script=SCRIPT) as group:
        yield group


# ------------------------------------------------------------------------------------------------- one layer at a time
KINDS = ("Model", "Twice", "Tied", "Mixed", "Borrowed", "Halves", "Recomputed", "Frozen", "Rows", "NoBias")
WHOLE = {"Tied": {"first", "second"}, "Mixed": {"first"}, "Borrowed": {"first"}, "Frozen": {"first"}}
"""Layers whose weights have other uses, or are not trained: their gradients stay in I."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_at_a_time(two, kind, full):
    """In whatever ways weights are used, W is bitwise what a plain backward is. There is a weight without gradient in all of them."""
    options = [{}, {"dtype": "bfloat16"}, {"overlap": True}, {"way": "eager"}, {"lag": 0}]
    options += [{"collective": name} for name in ("sequence_parallel", "allreduce_dgrad")]
    if kind != "Mixed":  # where Megatron's own fused backward loses the gradient of the use outside the layer
        options += [{"fused": True}, {"fused": True, "dtype": "bfloat16", "overlap": True}]
    if not full:  # each of them with some kinds, and all with two
        options = options if kind in ("Model", "Recomputed") else [{"dtype": "bfloat16"}, options[KINDS.index(kind) % len(options)]]
    for each in options:
        for where, split in two.run("small", kind=kind, **each):
            assert where is None, each
            whole = set() if each.get("way") == "eager" and kind in ("Mixed", "Borrowed") else WHOLE.get(kind, set())
            assert set(split) == {"first", "second", "unused"} - whole, each


def test_the_comparison_of_layers_sees_a_lost_gradient(two):
    """Control: without the detection, what autograd accumulated for a use outside the layer would be handed on at another time."""
    assert all(where is not None for where, _ in two.run("small", kind="Mixed", dtype="bfloat16", break_it=True))


def test_layers_of_transformer_engine_are_driven_by_their_protocol(two):
    """Stand-ins that follow it, as the real ones can't run here: put off and computed in W, or at once where no I runs."""
    for kind, each in itertools.product(("Engine", "Fused"), ({}, {"dtype": "bfloat16", "overlap": True}, {"way": "eager"})):
        assert [where for where, _ in two.run("small", kind=kind, **each)] == [None, None], (kind, each)


def test_writing_into_what_waits_is_seen(two):
    for said in two.run("written_in_place"):
        assert said.startswith("a tensor that a weight gradient of SplitColumnParallelLinear (8, 8) needs was written in place between I and W;")


def test_what_is_split(two):
    """Every linear layer of the decoder; never the embedding, nor a weight that is tied to it."""
    linears = {f"{layer}.weight" for layer in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")}
    embedding = "embedding.word_embeddings.weight"
    for tied in (True, False):
        for rank, (split, whole, marked) in enumerate(two.run("what_is_split", tied=tied)):
            names = {f"decoder.layers.{layer}.{name}" for layer in (2 * rank, 2 * rank + 1) for name in linears}
            last = {embedding} if rank else set()  # the output layer, by the name of what it is tied to
            assert split == marked == (names if tied else names | last)
            assert whole == (last if tied else set())


# ------------------------------------------------------------------------------------------------- whole steps
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [
    {}, {"hint": "announced", "limit": "2p-1"}, BFW, {"hint": "fill-r", "limit": "2p-1"}, {"hint": "f-first", "limit": "5", "max_pending_w": 2},
    {"hint": "zb-h1", "mode": "strict", "limit": "2"}, {"hint": "zb-h2", "mode": "strict", "limit": "3"}],
    ids=lambda options: "-".join(map(str, options.values())) or "default")
def test_bitwise_equal_under_random_delays(two, options, full):
    where = two.run("same", microbatches=5, seeds=list(range(20 if full else 1)), options=options, deadline=600)
    assert where == [None, None]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", [
    {"recompute": True}, {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}, {"tied": False},
    {"add_bias_linear": False}, {"calculate_per_token_loss": True}], ids=lambda settings: "-".join(settings))
def test_bitwise_equal_whatever_the_model(two, settings, full):
    where = two.run("same", microbatches=5, seeds=list(range(10 if full else 1)), options=BFW, deadline=200, **settings)
    assert where == [None, None]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_precision(two, kind):
    results = two.run("precision", kind=kind, steps=4, microbatches=3, options=BFW)
    assert [where for where, _ in results] == [None, None]
    if kind == "float16":
        assert results[0][1] >= 1, "the loss scale starts so high that a step is skipped"


def test_split_layers_without_a_split_are_ordinary_ones(two):
    """Under Megatron's own schedule, under whole backwards, and in evaluation."""
    assert two.run("elsewhere", microbatches=4) == [{"Megatron's": None, "whole": None, "evaluation": None}] * 2


SIZES = {
    "PP2xTP2": dict(ranks=4, pipeline=2, tensor_model_parallel_size=2),
    "PP2xEP2": dict(ranks=4, pipeline=2, expert_model_parallel_size=2),
    "PP2xCP2": dict(ranks=4, pipeline=2, context_parallel_size=2),
    "PP2xVPP2": dict(ranks=2, virtual_pipeline_model_parallel_size=2),
    "PP2xDP2": dict(ranks=4, pipeline=2),
    "PP2xVPP2xDP2": dict(ranks=4, pipeline=2, virtual_pipeline_model_parallel_size=2),
}
OVERLAPS = {
    "": {}, "overlap-grad-reduce": {"overlap": True}, "distributed-optimizer": {"distributed": True},
    "distributed-optimizer-aligned": {"distributed": True, "overlap": True, "gather": True, "align": True},
}
CASES = {
    "PP2xTP2": {"": {}, "SP": {"sequence_parallel": True}, "SP-recompute": {"sequence_parallel": True, "recompute": True}},
    "PP2xEP2": {"": {"experts": 4}},
    "PP2xCP2": {"": {}},
    "PP2xVPP2": {"": {}},
    "PP2xDP2": OVERLAPS,
    "PP2xVPP2xDP2": OVERLAPS,
}


@pytest.fixture(scope="module", params=SIZES)
def layout(request):
    with Group(script=SCRIPT, **SIZES[request.param]) as group:
        yield request.param, group


@pytest.mark.timeout(1200)
def test_bitwise_equal_with_every_kind_of_parallelism(layout, full):
    """Delays differ between the ranks of one domain. Chunks of a rank share its random generator: no dropout, or Megatron's order of forwards."""
    name, group = layout
    for case, settings in CASES[name].items():
        orders = ("microbatch", "megatron") if "VPP" in name and (full or not case) else ("microbatch",)
        for order in orders:
            options = {"hint": "bfw", "limit": "16", "order": order}
            dropout = {"dropout": 0.0} if order == "microbatch" and "VPP" in name else {}
            where = group.run("same", microbatches=4, seeds=list(range(10 if full else 1)), steps=2, options=options, deadline=500,
                              **settings | dropout)
            assert where == [None] * group.ranks, (case, order)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["strict", "ready"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_interleaved_zero_bubble(two, chunks, mode, full):
    """PyTorch's list, with and without several chunks."""
    with contextlib.nullcontext(two) if chunks == 1 else Group(script=SCRIPT, **SIZES["PP2xVPP2"]) as group:
        options = {"hint": "interleaved-zero-bubble", "mode": mode, "limit": "8"}
        where = group.run("same", microbatches=4, seeds=list(range(20 if full else 1)), options=options, dropout=0.0, deadline=300)
        assert where == [None, None]


def test_reductions_wait_for_every_gradient_and_are_counted_alike():
    """With replicas whose reductions overlap: each parameter is ready as often as under whole backwards, in each of five steps. The control
    tells that a weight is ready in I, whose gradient is not there yet."""
    group = Group(script=SCRIPT, **SIZES["PP2xDP2"])
    try:
        for (whole, golden), (split, their_golden) in group.run("ready_counts", microbatches=3, steps=5, overlap=True):
            assert whole == split and all(step == golden == their_golden for step in split) and golden
        found = group.run("early_hooks", microbatches=3, steps=2, overlap=True)
        print(found)
        assert any(found), "a reduction that starts before the last W must be seen"
    finally:
        group.kill()


# ------------------------------------------------------------------------------------------------- order, memory, refusals
def actions(directory: Path) -> dict[int, list[str]]:
    """Rank -> what its one call ran, in order."""
    timeline = read(directory)
    assert not timeline.missing and not timeline.notes
    return {rank: [str(ran.action) for ran in sorted(call.actions, key=lambda ran: ran.start)]
            for rank, trace in timeline.ranks.items() for call in trace.calls.values()}


M = 6


def test_the_trace_holds_every_action_and_another_order_than_1f1b(two, tmp_path):
    assert two.run("traced", microbatches=M, directory=str(tmp_path), options=BFW) == [None, None]
    ran = actions(tmp_path)
    for stage in (0, 1):
        for kind in "FIW":
            assert [action for action in ran[stage] if action[1] == kind] == [f"{stage}{kind}{m}" for m in range(M)]
        assert len(ran[stage]) == 3 * M
    follows = [ran[stage][i + 1] == action.replace("I", "W") for stage in ran for i, action in enumerate(ran[stage]) if "I" in action]
    assert not all(follows), "some W must wait"


def test_a_stage_without_trained_weights_has_no_w(two, tmp_path):
    """Its linear layers are frozen, the rest is trained."""
    assert two.run("traced", microbatches=M, directory=str(tmp_path), options=BFW, freeze=0, add_bias_linear=False) == [None, None]
    ran = actions(tmp_path)
    assert len(ran[0]) == 2 * M and not any("W" in action for action in ran[0])
    assert len(ran[1]) == 3 * M


def test_memory_of_pending_weight_gradients_is_flat_in_the_number_of_microbatches(two):
    """And a multiple of what one microbatch's W holds: 7 hidden sizes of inputs and 9 of output gradients per token and layer."""
    tokens, hidden, layers = 2 * 16, 32, 2
    one = 16 * hidden * tokens * 4 * layers
    for bound, settings, most in ((None, {}, 3), (2, {}, 2), (None, {"recompute": True}, 1)):
        options = {"hint": "bfw", "mode": "strict", "limit": "3", "max_pending_w": bound}  # what waits does not hang on times then
        peaks = [two.run("memory_of_pending", microbatches=m, options=options, **settings) for m in (4, 8, 16)]
        assert peaks[0] == peaks[1] == peaks[2], (bound, settings)
        assert max(count for _, count in peaks[0]) == most
        assert all(held == one * count for held, count in peaks[0])


def test_a_gradient_that_is_left_behind_is_an_error_and_so_is_a_model_that_was_built_before(two):
    for left, before in two.run("left_behind"):
        assert left.startswith("RuntimeError: weight gradients were left behind at the end of the step: microbatches []")
        assert before.startswith("ConfigurationError: --rrfp-split-backward: this DistributedDataParallel was not wrapped in Megatron's")
        assert "call rrfp.install() before the model is built" in before


def test_w_before_its_i_is_an_error_on_every_rank():
    """The negative control."""
    group = Group(2, script=SCRIPT)
    try:
        for said, waiting in group.run("weights_first"):
            assert "RuntimeError: the W of microbatch 0 was to run before its I" in said and not waiting
    finally:
        group.kill()
