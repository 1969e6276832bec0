"""Annotated Megatron models: their captured segments are Megatron's own forward and backward, for every batch size."""

import pytest
from group import Group


@pytest.fixture(scope="module")
def one():
    with Group(1, script="annotation_jobs.py") as group:
        yield group


CASES = ("rope", "learned", "llama", "others", "nothing is dropped", "tokens are dropped", "shared experts")
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_token_dispatcher_type": "alltoall",
           "moe_router_load_balancing_type": "none", "add_bias_linear": False, "moe_pad_expert_input_to_capacity": True,
           "moe_expert_capacity_factor": 2.0}


@pytest.mark.parametrize("case", CASES)
def test_segments_of_one_capture_are_megatrons_forward_and_backward(one, case, full):
    """Loss and every gradient, for batches of two other sizes than the captured one; and the annotated model as it is."""
    [(differences, as_it_is, segments, across)] = one.run("captured", case=case, sizes=(1, 3, 8, 17) if full else (3, 8))
    assert max(differences.values()) < 1e-6 and as_it_is < 1e-6, (differences, as_it_is)
    assert len({name.partition(".")[0] for name in segments}) == {"learned": 4, "others": 4, "shared experts": 4}.get(case, 2)
    assert set(across.values()) == {(16, 4, 32)}, "only hidden states go from stage to stage: no masks, no tables of positions"
    experts = [name for name in segments if ".EP" in name]
    assert len(experts) == (4 if "dropped" in case or "experts" in case else 0)


def test_a_mask_weighs_losses(one):
    [(differences, as_it_is, *_)] = one.run("captured", case="rope", masked=True)
    assert max(differences.values()) < 1e-6 and as_it_is < 1e-6


@pytest.mark.parametrize("case, cut", [("rope", "PP0"), ("nothing is dropped", "PP1.EP2")])
def test_a_gradient_that_is_lost_between_two_segments_is_seen(one, case, cut):
    """Negative control of the comparison."""
    [(differences, as_it_is, *_)] = one.run("captured", case=case, cut=cut)
    assert min(differences.values()) > 1e-3 and as_it_is < 1e-6


def test_megatron_is_left_alone(one):
    assert one.run("megatron_is_left_alone") == [0.0]


@pytest.mark.parametrize("settings", [{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, {"moe_z_loss_coeff": 0.1}])
def test_what_is_refused_would_be_wrong(one, settings):
    """Control: a hand-written backward that is not the derivative of its forward is lost in a trace."""
    [found] = one.run("not_refused", **EXPERTS | settings)
    assert found > 1e-5


REFUSED = [
    ({"stages": 3}, "stages 3: must divide the model's 4 layers"),
    ({"stages": [2, 0, 2]}, "stages [2, 0, 2]: must be 4 layers in all, at least one each but for the first and the last stage"),
    ({"stages": [2, 1]}, "stages [2, 1]: must be 4 layers in all"),
    ({"wrap": True}, "model: is a Sequential; give Megatron-core's GPTModel itself"),
    ({"twice": True}, "model: is annotated already"),
    ({"part": True}, "model: is one pipeline stage's; build it with pre_process and post_process"),
    ({"hidden_dropout": 0.1}, "model: hidden_dropout: a program's order must not change what is drawn; set it to 0"),
    ({"attention_dropout": 0.1}, "model: attention_dropout: "),
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "model: recompute_granularity: "),
    ({"masked_softmax_fusion": True}, "model: masked_softmax_fusion: is a compiled kernel; set it to False"),
    ({"log_max_attention_logit": True}, "model: qk_clip and log_max_attention_logit: "),
    (EXPERTS | {"moe_pad_expert_input_to_capacity": False}, "model: how many tokens an expert gets: what lies in no fixed shape cannot be traced;"),
    (EXPERTS | {"moe_expert_capacity_factor": 1.1}, "moe_expert_capacity_factor 1.1: sequence length x moe_router_topk x factor / 4 experts must be"),
    (EXPERTS | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}, "model: moe_aux_loss_coeff: its gradient is added in"),
    (EXPERTS | {"moe_z_loss_coeff": 0.01}, "model: moe_z_loss_coeff: its gradient is added in a hand-written backward"),
    (EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}, "model: moe_router_enable_expert_bias: counts"),
    (EXPERTS | {"moe_input_jitter_eps": 0.1}, "model: moe_input_jitter_eps and forced routing: "),
    (EXPERTS | {"add_bias_linear": True}, "model: add_bias_linear with experts: "),
]  # fmt: skip


@pytest.mark.parametrize("settings, line", REFUSED, ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_what_cannot_be_traced_is_refused_by_name(one, settings, line):
    [found] = one.run("refused", **settings)
    assert found is not None and found.startswith(line) and "\n" not in found, found
