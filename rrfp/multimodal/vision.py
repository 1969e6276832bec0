"""One stage's slice of the ViT: patches become tokens on its first stage, the projector gives them the LLM's width on its last."""

import copy

import torch
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec, get_vit_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock


class VisionSlice(MegatronModule):
    """Layers of a ViT over images of differing sizes, each attending to itself alone.

    A stage's message is [p, n, hidden]: p patches of the largest of n images. It is empty if the microbatch has no image: then no layer
    runs here, forward or backward.

    Args:
        config: the ViT's, its `pipeline_model_parallel_layout` that of the ViT.
        pre_process: begin with patches. post_process: end with a norm and the projector.
        patch: numbers in one patch. grid: patches along an image's side, at most.
        language: the LLM's config, whose hidden size the projector gives.
        zero_gradients: an image-free microbatch gives every parameter a gradient of zeros instead of none: gradient reduction that
            overlaps with backwards counts on one per parameter and step.
    """

    def __init__(self, config: TransformerConfig, *, pre_process: bool, post_process: bool, patch: int, grid: int, language: TransformerConfig,
                 vp_stage: int | None = None, transformer_engine: bool = False, zero_gradients: bool = False, pg_collection=None):
        super().__init__(config=config)
        self.pre_process, self.post_process, self._grid, self._zero_gradients = pre_process, post_process, grid, zero_gradients
        self._width = language.hidden_size if post_process else config.hidden_size
        if pre_process:
            self.patch_embedding = torch.nn.Linear(patch, config.hidden_size, dtype=config.params_dtype)
            self.position_embedding = torch.nn.Embedding(grid * grid, config.hidden_size, dtype=config.params_dtype)
            for weight in (self.patch_embedding.weight, self.position_embedding.weight):
                config.init_method(weight)
            torch.nn.init.zeros_(self.patch_embedding.bias)
        self.decoder = TransformerBlock(
            config=config, spec=_specification(transformer_engine), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage,
            pg_collection=pg_collection)
        if post_process:
            self.projector = MultimodalProjector(
                _projector_config(language), _projector_layers(transformer_engine), "mlp", config.hidden_size,
                **({} if pg_collection is None else {"pg_collection": pg_collection}))

    def forward(self, patches: torch.Tensor | None, grids: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """[p, n, hidden], or [p, n, hidden of the LLM] behind the projector.

        Args:
            patches: [n, p, numbers], on the first stage.
            grids: int [n, 2], rows and columns of patches of every image.
            hidden: the previous stage's output, elsewhere.
        """
        if not len(grids):
            empty = torch.empty(0, 0, self._width, dtype=self.config.params_dtype, device=grids.device)
            return _PassBy.apply(empty, self._zero_gradients, hidden, *(p for p in self.parameters() if p.requires_grad))
        if self.pre_process:
            hidden = self._embedded(patches, grids)
        else:
            self.decoder.set_input_tensor(hidden)
        hidden = self.decoder(hidden, own_patches(grids).logical_not()[:, None, None])
        return self.projector(hidden) if self.post_process else hidden

    def _embedded(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        if (largest := int(grids.max())) > self._grid:
            raise ValueError(f"an image has {largest} patches along a side, but --vit-grid is {self._grid}; raise it, or resize the image")
        at = torch.arange(patches.shape[1], device=patches.device)[None]
        rows, columns = at // grids[:, 1:], at % grids[:, 1:]
        places = (rows * self._grid + columns).clamp(max=self._grid**2 - 1)  # beyond an image's own patches: any
        dtype = self.patch_embedding.weight.dtype
        hidden = self.patch_embedding(patches.to(dtype)) + self.position_embedding(places)
        return hidden.transpose(0, 1).contiguous()


def own_patches(grids: torch.Tensor) -> torch.Tensor:
    """bool [n, p]: which of the places for the largest image's patches are an image's own.

    grids: int [n, 2], at least one.
    """
    counts = grids.prod(1)
    return torch.arange(int(counts.max()), device=grids.device)[None] < counts[:, None]


class _PassBy(torch.autograd.Function):
    """What the layers make of no images: nothing, [0, 0, width], and a backward that hands an empty gradient on."""

    @staticmethod
    def forward(context, empty, zeros, hidden, *parameters):
        context.zeros, context.parameters = zeros, parameters
        context.shape = None if hidden is None else hidden.shape
        return empty.clone()

    @staticmethod
    def backward(context, gradient):
        below = None if context.shape is None else gradient.new_empty(context.shape)
        return None, None, below, *(torch.zeros_like(p) if context.zeros else None for p in context.parameters)


def _specification(transformer_engine: bool):
    specification = get_vit_layer_with_transformer_engine_spec() if transformer_engine else get_vit_layer_with_local_spec()
    specification.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    return specification


def _projector_config(language: TransformerConfig) -> TransformerConfig:
    config = copy.deepcopy(language)
    config.sequence_parallel = config.gated_linear_unit = config.bias_activation_fusion = False
    config.activation_func = torch.nn.functional.gelu
    config.add_bias_linear = True
    config.ffn_hidden_size = config.hidden_size
    return config


def _projector_layers(transformer_engine: bool) -> MLPSubmodules:
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        return MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
