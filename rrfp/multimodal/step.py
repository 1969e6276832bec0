"""One microbatch through one stage: what Megatron calls a forward step, and the loss."""

import functools
from collections.abc import Iterator, Mapping

import torch
from megatron.core.utils import get_attr_wrapped_model


def forward_step(data_iterator: Iterator[dict] | None, model: torch.nn.Module):
    """`forward_step_func` of Megatron's schedules: (output, loss function). Every stage takes one item of its iterator per microbatch.

    data_iterator: gives `rrfp.multimodal.batch.collate`d microbatches, with what `parts_of` the stage names at least. None where it names
        nothing.
    """
    stage = get_attr_wrapped_model(model, "evaluation", return_model_obj=True)
    batch = {} if data_iterator is None else {
        name: value.cuda(non_blocking=True) if torch.is_tensor(value) else value for name, value in next(data_iterator).items()}
    output = model(batch)
    return output, functools.partial(loss_func, batch.get("loss_mask"), stage.evaluation)


def loss_func(loss_mask: torch.Tensor, evaluation: Mapping[str, torch.Tensor], losses: torch.Tensor):
    """As `pretrain_gpt.loss_func`: masked sum of the token losses, the number of tokens, and what is logged, each as [sum, count].

    evaluation: more to log, of `VlmStage`.
    """
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * loss_mask)
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)]), **evaluation}
