"""The forward graph of a model, as plain data: what a capture hands to the compiler, and what a program file may describe.

A *segment* is a stretch of the model between two annotations. It is the smallest thing that a strategy can place, shard, split or
order; the tags say which annotations it lies under.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rrfp.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z_][\w.]*")
EXPERT_PARTS = ("attention", "experts", "combine")
"""Of a stage with experts, in a sketch."""
_BYTES = re.compile(r"(\d+)(?:_|$|e)")


@dataclass(frozen=True)
class Tensor:
    """Shape and type of an activation, an input of the batch, or a parameter.

    Args:
        shape: of the whole batch of one replica; of a parameter, all of it.
        dtype: as torch prints it, without `torch.`: `float32`, `bfloat16`, `int64`.
        batch: the dimension that `split` divides; None: every microbatch gets all of it (a mask, a table of positions).
        gradient: False for numbers through which no gradient flows, though they are floating point.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    batch: int | None = 0
    gradient: bool = True

    @property
    def nbytes(self) -> int:
        width = _BYTES.search(self.dtype)
        return math.prod(self.shape) * (int(width[1]) // 8 if width else 1)

    @property
    def differentiable(self) -> bool:
        return self.gradient and self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class Segment:
    """A stretch of the model.

    Args:
        name: unique, like `layers.0.attention`.
        tags: annotation -> index in trace order, for every annotation that it lies under.
        inputs, outputs: tensors by name; a tensor has one producer and any number of consumers.
        parameters: by name. One name in two segments is one (tied) parameter.
        frozen: its parameters do not train.
    """

    name: str
    tags: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    frozen: bool = False


@dataclass(frozen=True)
class Traced:
    """A model's forward. Branches that split and join are allowed.

    Args:
        segments: in trace order, each after the producers of its inputs.
        tensors: every activation, batch input and parameter.
        loss: the tensor that is the loss, a scalar for each microbatch.

    Raises:
        ConfigurationError: naming the segment and the tensor that is missing, made twice, or used before it is made.
    """

    segments: tuple[Segment, ...]
    tensors: Mapping[str, Tensor]
    loss: str

    def __post_init__(self):
        names: set[str] = set()
        made: dict[str, str] = {}
        outputs = {name for segment in self.segments for name in segment.outputs}
        for segment in self.segments:
            if not _NAME.fullmatch(segment.name) or segment.name in names:
                raise ConfigurationError(f"model: segment {segment.name!r}: must have a name of its own, of letters, digits, _ and dots")
            names.add(segment.name)
            for name in (*segment.inputs, *segment.outputs, *segment.parameters):
                if name not in self.tensors:
                    raise ConfigurationError(f"model: segment {segment.name}: nothing is known of tensor {name}; give its shape and type")
            for name in segment.inputs:
                if name in outputs and name not in made:
                    raise ConfigurationError(f"model: segment {segment.name}: uses {name} before a segment makes it; reorder the segments")
            for name in segment.outputs:
                if name in made:
                    raise ConfigurationError(f"model: segment {segment.name}: makes {name}, which {made[name]} made; name it otherwise")
                made[name] = segment.name
        if self.loss not in made:
            raise ConfigurationError(f"model: loss {self.loss}: no segment makes it; name an output of the last segment")

    @cached_property
    def producer(self) -> Mapping[str, Segment]:
        """Tensor -> the segment that makes it. Inputs of the batch have none."""
        return {name: segment for segment in self.segments for name in segment.outputs}

    @cached_property
    def trained(self) -> tuple[Segment, ...]:
        """Segments with a backward, in trace order: a gradient comes to them from the loss, and a trained parameter lies at or below."""
        below: set[str] = set()
        for segment in self.segments:
            before = (self.producer[name].name for name in segment.inputs if name in self.producer and self.tensors[name].differentiable)
            if (segment.parameters and not segment.frozen) or below.intersection(before):
                below.add(segment.name)
        above = {self.producer[self.loss].name}
        for segment in reversed(self.segments):
            if segment.name in above:
                above |= {self.producer[n].name for n in segment.inputs if n in self.producer and self.tensors[n].differentiable}
        return tuple(segment for segment in self.segments if segment.name in below & above)


def sketch(
    stages: int,
    *,
    parts: Sequence[str] = (),
    batch: int = 64,
    hidden: int = 64,
    parameters: Mapping[str, int] | int = 4096,
) -> Traced:
    """A model in outline: a chain of `stages`, tagged PP=0.., to try a strategy on without a model. The last segment makes the loss.

    Args:
        parts: the segments of a stage, for example `("attention", "experts", "combine")`; none: a stage is one segment. A part called
            `experts` is tagged EP, numbered along the model; other parts' outputs past the experts take the residual along.
        batch, hidden: activations are batch x hidden.
        parameters: how many numbers each segment trains, for all or by part.
    """
    tensors = {"batch": Tensor((batch, hidden))}
    segments, last, experts = [], "batch", 0
    for stage in range(stages):
        for part in parts or ("",):
            name = f"stage{stage}" + (f".{part}" if part else "")
            tags = {"PP": stage}
            if part == "experts":
                tags["EP"] = experts
                experts += 1
            inputs = (last,)
            if segments and segments[-1].tags.get("EP") is not None and part != "experts" and segments[-1].tags["PP"] == stage:
                inputs = tuple(dict.fromkeys((last, *segments[-1].inputs)))  # the residual goes around the experts
            count = parameters if isinstance(parameters, int) else parameters.get(part, 0)
            weights = (f"{name}.weight",) if count else ()
            tensors |= {f"{name}.out": Tensor((batch, hidden)), **{weight: Tensor((count,), batch=None) for weight in weights}}
            segments.append(Segment(name, tags, inputs, (f"{name}.out",), weights))
            last = f"{name}.out"
    tensors[last] = Tensor((), batch=None)
    return Traced(tuple(segments), tensors, last)
