"""Megatron's bit-exact runner on one of several bare processes, but its two runs are Megatron's schedule and ours.

    megatron_suite_determinism.py DROPOUT reversed|same

"reversed" is the control: backwards run last to first, the same mathematics in another rounding.
"""

import os
import sys

from rrfp.megatron import cpu

cpu.enable()
cpu.patch_megatron()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from tests.unit_tests.determinism.bit_exact_runner import BitExactRunner  # noqa: E402
from tests.unit_tests.determinism.configs import gpt_base  # noqa: E402

import rrfp  # noqa: E402
from rrfp.engine.loop import Engine  # noqa: E402

LENGTH, BATCH, VOCABULARY = 32, 4, 128
OWN = schedules.forward_backward_pipelining_without_interleaving
RANKS = int(os.environ["WORLD_SIZE"])
engine_calls = 0


def build(overrides, pre_process=True, post_process=True, vp_stage=None):
    """As the GPT of Megatron's determinism tests, in layers that need no Transformer Engine."""
    return GPTModel(
        config=TransformerConfig(**gpt_base() | overrides),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        position_embedding_type="rope",
    )


def inputs():
    import torch

    return {
        "input_ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH)),
        "position_ids": torch.arange(LENGTH).unsqueeze(0).repeat(BATCH, 1),
        "attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
    }


class Runner(BitExactRunner):
    """Its first run is under Megatron's schedule, its second under ours."""

    def __init__(self, options):
        super().__init__(build_model=build, make_inputs=inputs, base_config=gpt_base, seq_len=LENGTH, micro_batch=BATCH)
        self._options, self.runs, self.gradients = options, 0, 0

    def _pipeline_fwd_bwd(self, chunks, num_microbatches=1):
        self.runs += 1
        if self.runs == 2:
            rrfp.install(cpu=True, timeout=60.0, **self._options)
        assert (schedules.get_forward_backward_func() is OWN) == (self.runs == 1)
        loss, gradients = super()._pipeline_fwd_bwd(chunks, num_microbatches)
        assert len(gradients) == len(list(chunks[0].parameters())) and all(
            gradient.abs().max() > 0 for gradient in gradients.values()
        )
        self.gradients = len(gradients)
        return loss, gradients


def main(dropout, order):
    run = Engine.run

    def counted(*args, **kwargs):
        global engine_calls
        engine_calls += 1
        return run(*args, **kwargs)

    Engine.run = counted
    options = {}
    if order == "reversed":
        rows = [
            [f"{rank}F{m}" for m in range(RANKS)] + [f"{rank}B{m}" for m in reversed(range(RANKS))] for rank in range(RANKS)
        ]
        rrfp.register_hint("reversed", lambda context: rows)
        options = {"hint": "reversed", "order": "free", "mode": "strict", "limit": RANKS}
    runner = Runner(options)
    runner.run({"num_layers": 4, "hidden_dropout": dropout, "attention_dropout": dropout}, {"PP": RANKS})
    rrfp.uninstall()
    assert runner.runs == 2 and engine_calls == 1, (runner.runs, engine_calls)
    print(f"bit-exact: {runner.gradients} gradients")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
