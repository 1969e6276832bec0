"""Parts of a model: how many parameters each has, and how many floating-point operations its forward takes. Pure arithmetic.

Parameters are counted as Megatron builds them (`megatron.core.transformer`, `GPTModel`), operations as Megatron counts them
(`megatron.training.training.num_floating_point_operations`): matrix products only, 2 operations per multiply-add, causal attention at
half of the full square. A backward takes twice its forward.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by how they are spread.

    sharded: over the tensor-parallel ranks. replicated: whole on each of them. experts: over the expert-parallel ranks.
    copy: of `sharded`, those that repeat another stage's (the tied embedding on the last stage): held, but not a part of the model's size.
    """

    sharded: int = 0
    replicated: int = 0
    experts: int = 0
    copy: int = 0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.sharded + other.sharded, self.replicated + other.replicated, self.experts + other.experts, self.copy + other.copy)

    @property
    def total(self) -> int:
        """Held by the stage, each counted once however many ranks hold it."""
        return self.sharded + self.replicated + self.experts

    def per_rank(self, *, tensor: int = 1, expert: int = 1, expert_tensor: int | None = None) -> int:
        """Held by one rank of a stage, with that tensor-, expert- and expert-tensor-parallel size."""
        return self.sharded // tensor + self.replicated + self.experts // (expert * (tensor if expert_tensor is None else expert_tensor))


@dataclass(frozen=True)
class Sample:
    """What costs depend on: text tokens including those that images become, images, and the patches of one image."""

    tokens: float
    images: float = 0.0
    patches: int = 0


@dataclass(frozen=True)
class Part:
    """Something a stage holds. name: one letter, as layouts write it."""

    name: str
    parameters: Parameters = field(default_factory=Parameters)

    def operations(self, sample: Sample) -> float:
        """Of the forward for one sample."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Widths of self-attention: `heads` queries and `groups` keys and values of `head` numbers each."""

    heads: int
    groups: int
    head: int
    causal: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def width(self) -> int:
        """Of all queries together."""
        return self.heads * self.head


@dataclass(frozen=True, kw_only=True)
class Feedforward:
    """Widths of the MLP, dense or of experts.

    gated: two products up instead of one (SwiGLU). experts: how many there are, 0 for a dense MLP of width `width`; else every token
    goes through `chosen` of them, each of width `width`, and through a shared one of width `shared`.
    """

    width: int
    gated: bool = False
    experts: int = 0
    chosen: int = 0
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all layers of a tower share. bias: linear layers have one. norm_bias: norms have a bias (LayerNorm) or none (RMSNorm)."""

    hidden: int
    attention: Attention
    feedforward: Feedforward
    bias: bool = True
    norm_bias: bool = True

    @property
    def norm(self) -> int:
        """Parameters of a norm over the hidden size."""
        return self.hidden * (1 + self.norm_bias)

    def layer(self, name: str = "t") -> "Layer":
        return Layer(name, _layer_parameters(self), shape=self)

    def vision_layer(self, name: str = "v") -> "VisionLayer":
        """A layer that works within each image: attention over its patches, in both directions."""
        shape = replace(self, attention=replace(self.attention, causal=False))
        return VisionLayer(name, _layer_parameters(shape), shape=shape)

    def operations(self, tokens: float) -> float:
        """Of one layer's forward on one sequence."""
        attention, mlp = self.attention, self.feedforward
        products = _attention_weights(self) + _mlp_weights(self, mlp.shared if mlp.experts else mlp.width)
        if mlp.experts:
            products += mlp.chosen * _mlp_weights(self, mlp.width)
        square = 2 * tokens**2 * attention.width * (1 if attention.causal else 2)
        return 2 * tokens * products + square


@dataclass(frozen=True)
class Layer(Part):
    """A transformer layer of a language model."""

    shape: Shape = None

    def operations(self, sample: Sample) -> float:
        return self.shape.operations(sample.tokens)


@dataclass(frozen=True)
class VisionLayer(Layer):
    """A transformer layer of a vision tower."""

    def operations(self, sample: Sample) -> float:
        return sample.images * self.shape.operations(sample.patches)


@dataclass(frozen=True)
class Product(Part):
    """A matrix product: `weights` of it for each token, or for each patch of each image."""

    weights: int = 0
    per: str = "token"

    def operations(self, sample: Sample) -> float:
        return 2 * self.weights * (sample.tokens if self.per == "token" else sample.images * sample.patches)


def embedding(hidden: int, vocabulary: int, positions: int = 0) -> Part:
    """Word embeddings, and learned ones of `positions` positions. Looking up takes no operations. vocabulary: as padded."""
    return Part("E", Parameters(sharded=vocabulary * hidden, replicated=positions * hidden))


def output(hidden: int, vocabulary: int, *, norm: int, tied: bool, copied: bool) -> Part:
    """The last norm and the output layer.

    tied: its weight is the embedding's. copied: the embedding is on another stage, so that the last holds a copy.
    """
    weights = vocabulary * hidden
    parameters = Parameters(sharded=weights if copied or not tied else 0, replicated=norm, copy=weights if tied and copied else 0)
    return Product("L", parameters, weights=weights)


def _attention_weights(shape: Shape) -> int:
    attention = shape.attention
    return shape.hidden * attention.head * (2 * attention.heads + 2 * attention.groups)


def _mlp_weights(shape: Shape, width: int) -> int:
    return (3 if shape.feedforward.gated else 2) * shape.hidden * width


def _layer_parameters(shape: Shape) -> Parameters:
    attention, mlp = shape.attention, shape.feedforward
    qkv = attention.head * (attention.heads + 2 * attention.groups)
    sharded, replicated = _attention_weights(shape), 2 * shape.norm
    if shape.bias or attention.qkv_bias:
        sharded += qkv
    if shape.bias:
        replicated += shape.hidden
    if attention.qk_norm:
        replicated += 2 * attention.head * (1 + shape.norm_bias)
    if not mlp.experts:
        return Parameters(sharded + _mlp(shape, mlp.width)[0], replicated + _mlp(shape, mlp.width)[1])
    replicated += mlp.experts * (shape.hidden + shape.bias)  # the router
    if mlp.shared:
        sharded, replicated = sharded + _mlp(shape, mlp.shared)[0], replicated + _mlp(shape, mlp.shared)[1]
    return Parameters(sharded, replicated, mlp.experts * sum(_mlp(shape, mlp.width)))


def _mlp(shape: Shape, width: int) -> tuple[int, int]:
    """Parameters of one MLP of that width: what tensor parallelism divides, and what it repeats."""
    up = width * (2 if shape.feedforward.gated else 1)
    return _mlp_weights(shape, width) + (up if shape.bias else 0), shape.hidden if shape.bias else 0
