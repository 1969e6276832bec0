"""The script that a `Group`'s process runs for tests of annotated models: capture them, and compare their segments with Megatron itself."""

from unittest import mock

import jobs  # first: it puts Megatron on the CPU before anything imports it
import model as gpt
import torch
import torch.nn.functional as F
from jobs import job
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from rrfp.errors import ConfigurationError
from rrfp.megatron import annotations
from rrfp.megatron.annotations import annotate_gpt, language_model_loss
from rrfp.program.capture import capture

WORDS, LENGTH, HIDDEN = 64, 16, 32
PADDED = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": HIDDEN, "moe_token_dispatcher_type": "alltoall",
          "moe_router_load_balancing_type": "none", "add_bias_linear": False, "moe_pad_expert_input_to_capacity": True,
          "moe_expert_capacity_factor": 2.0}
GATED = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
CASES = {
    "rope": (2, {}),
    "learned": ([0, 2, 2, 0], {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": False}),
    "llama": ([1, 3], {**GATED, "num_query_groups": 2, "normalization": "RMSNorm"}),
    "others": (4, {"qk_layernorm": True, "window_size": (4, 0), "rotary_interleaved": True, "apply_residual_connection_post_layernorm": True}),
    "nothing is dropped": (2, {**PADDED, **GATED}),
    "tokens are dropped": (2, {**PADDED, "moe_expert_capacity_factor": 0.5}),
    "shared experts": (4, {**PADDED, "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid"}),
}
"""name: (stages, settings)"""

MODEL = ("position_embedding_type", "share_embeddings_and_output_weights")


def build(**settings):
    gpt.seed_generators()
    config = {name: value for name, value in settings.items() if name not in MODEL}
    config = TransformerConfig(**{
        "num_layers": 4, "hidden_size": HIDDEN, "num_attention_heads": 4, "use_cpu_initialization": True, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "init_method_std": 0.2, "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False, "persist_layer_norm": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
        "apply_rope_fusion": False} | config)  # fmt: skip
    specification = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    more = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True} | {n: settings[n] for n in MODEL if n in settings}
    return GPTModel(config=config, transformer_layer_spec=specification, vocab_size=WORDS, max_sequence_length=LENGTH, **more)


def batch(rows, *, masked=False):
    generator = torch.Generator().manual_seed(rows)
    words = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=generator)
    mask = {"loss_mask": torch.rand(rows, LENGTH, generator=generator)} if masked else {}
    return {"tokens": words[:, :-1], "labels": words[:, 1:], **mask}


def own(model, given):
    """Loss and gradients as Megatron makes them; a layer's experts stacked."""
    rows = len(given["tokens"])
    losses = model(given["tokens"], torch.arange(LENGTH).expand(rows, -1), None, labels=given["labels"])
    weights = given.get("loss_mask", torch.ones_like(losses))
    loss = (losses * weights).sum() / weights.sum()
    model.zero_grad()
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return loss.item(), {name: grad for name, grad in found.items() if ".local_experts." not in name} | _stacked(found)


def _stacked(found):
    stacks = {}
    for name, grad in found.items():
        if ".local_experts." in name:
            layer, _, rest = name.partition(".local_experts.")
            stacks.setdefault(f"{layer}.{rest.split('.')[1].removeprefix('linear_')}", []).append(grad.T)
    return {name: torch.stack(grads) for name, grads in stacks.items()}


def by_segments(captured, given, *, cut=None):
    """The same from the captured segments, one after another. cut: of this segment's outputs the gradient is lost."""
    weights = {name: value.detach().clone().requires_grad_(value.is_floating_point()) for name, value in captured.weights.items()}
    values = dict(given)
    for segment in captured.traced.segments:
        inputs = {name: values[name] for name in segment.inputs}
        made = captured.functions[segment.name]({name: weights[name] for name in segment.parameters}, inputs)
        values |= {name: value.detach() if segment.name == cut else value for name, value in made.items()}
    loss = values[captured.traced.loss]
    loss.backward()
    trained = {name for segment in captured.traced.segments for name in segment.parameters}
    return loss.item(), {name: weights[name].grad for name in trained}


def difference(one, other):
    """The largest in loss and gradients; every parameter must be there."""
    (loss, grads), (wanted_loss, wanted) = one, other
    assert grads.keys() == wanted.keys(), grads.keys() ^ wanted.keys()
    found = [(0 if grads[name] is None else grads[name]) - grad for name, grad in wanted.items()]
    return max(abs(loss - wanted_loss), *(error.abs().max().item() for error in found))


def pair(stages, **settings):
    """Megatron's model, and the annotated one of the same weights."""
    model, annotated = build(**settings), build(**settings)
    annotated.load_state_dict(model.state_dict())
    return model, annotate_gpt(annotated, stages=stages)


@job
def captured(case, sizes=(3, 8), masked=False, cut=None):
    """({size: difference}, of the model run as it is, the segments' names, tensors between stages). One capture, of 4 rows."""
    stages, settings = CASES[case]
    model, annotated = pair(stages, **settings)
    found = capture(annotated, batch(4, masked=masked), loss=language_model_loss)
    segments = found.traced.segments
    differences = {size: difference(by_segments(found, batch(size, masked=masked), cut=cut), own(model, batch(size, masked=masked)))
                   for size in sizes}
    given = batch(sizes[0], masked=masked)
    as_it_is = language_model_loss(annotated, given)
    as_it_is.backward()
    grads = {name: weight.grad for name, weight in annotated.named_parameters()}
    as_it_is = difference((as_it_is.item(), grads), own(model, given))
    across = {tensor for segment in segments for tensor in segment.inputs if tensor in found.traced.producer
              and found.traced.producer[tensor].tags["PP"] != segment.tags["PP"]}
    return differences, as_it_is, [segment.name for segment in segments], {name: found.traced.tensors[name].shape for name in across}


@job
def megatron_is_left_alone():
    """What another, plain model computes after a capture: tables and buffers that models share hold numbers."""
    model, annotated = pair(2)
    before = own(model, batch(4))
    capture(annotated, batch(4), loss=language_model_loss)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        pass
    return difference(own(model, batch(4)), before)


@job
def refused(stages=2, wrap=False, twice=False, part=False, length=None, **settings):
    """The line that refuses it."""
    try:
        model = build(**settings)
        if part:
            model.post_process = False
        if wrap:
            model = torch.nn.Sequential(model)
        annotate_gpt(model, stages=stages)
        if twice:
            annotate_gpt(model, stages=stages)
        capture(model, batch(4), loss=language_model_loss)
    except ConfigurationError as error:
        return str(error)
    return None


@job
def not_refused(**settings):
    """How much a trace differs where a refusal is switched off."""
    with mock.patch.object(annotations, "check_traceable"):
        model, annotated = pair(2, **settings)
    found = capture(annotated, batch(4), loss=language_model_loss)
    return difference(by_segments(found, batch(4)), own(model, batch(4)))


if __name__ == "__main__":
    jobs.main()
