"""Samples of text with images, and the microbatch that is made of them: for each stage the parts that it reads."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rrfp.multimodal.costs import Load
from rrfp.multimodal.layout import Layout

IMAGE = -1
"""Stands in a sample's tokens for an image; a microbatch has the image token there, once per patch."""
PARTS = ("patches", "grids", "tokens", "labels")


class Image(NamedTuple):
    """channels, height, width: its size in pixels. pixels: makes the tensor [channels, height, width], numbers around 0."""

    channels: int
    height: int
    width: int
    pixels: Callable[[], torch.Tensor]


class Sample(NamedTuple):
    """Text with images. tokens: ids, `IMAGE` once for each of `images`, in order.

    captions: (begin, end) of the tokens that only the images tell: evaluation counts how many of them the model gets right. None: not known.
    """

    tokens: Sequence[int]
    images: Sequence[Image] = ()
    captions: Sequence[tuple[int, int]] | None = None


def parts_of(layout: Layout, stage: int) -> tuple[str, ...]:
    """What a stage reads of a microbatch: patches the first, image grids all of the ViT, tokens where the LLM begins, labels the last."""
    wanted = {"patches": stage == 0, "grids": layout.has_vit(stage) or stage == layout.tokens, "tokens": stage == layout.tokens,
              "labels": stage == layout.stages - 1}
    return tuple(part for part in PARTS if wanted[part])


def collate(samples: Sequence[Sample], *, patch: int, image_token: int, parts: Sequence[str] = PARTS, multiple: int = 1) -> dict:
    """One microbatch.

    Args:
        samples: its b samples.
        patch: side of a patch in pixels; an image's sides are multiples of it.
        image_token: id of the placeholder of a patch.
        parts: which to make.
        multiple: sequences are padded to a multiple of this length.

    Returns:
        always `load` (`costs.Load`); then, for n images with at most p patches, and sequences of length s:
        patches: float [n, p, channels * patch * patch], zero beyond an image's own.
        grids: int [n, 2], rows and columns of patches.
        tokens, labels: int [b, s]; a label is the token after it. loss_mask: float [b, s], 0 for padding and where the next token is a
        patch. captions, if the samples know theirs: int [b, s], k where the label belongs to the k-th caption of its sample, else 0.

    Raises:
        ValueError: an image's sides are no multiples of `patch`, or images and `IMAGE` tokens differ in number.
    """
    rows = [_expanded(sample, patch, image_token) for sample in samples]
    images = [image for sample in samples for image in sample.images]
    grids = [(image.height // patch, image.width // patch) for image in images]
    length = max(len(tokens) for tokens, _ in rows) - 1
    length += -length % multiple
    batch = {"load": Load(tuple(h * w for h, w in grids), (length,) * len(rows))}
    if "grids" in parts:
        batch["grids"] = torch.tensor(grids, dtype=torch.long).reshape(-1, 2)
    if "patches" in parts:
        batch["patches"] = _patches(images, grids, patch)
    if "tokens" in parts:
        batch["tokens"] = torch.tensor([_padded(tokens[:-1], length) for tokens, _ in rows])
    if "labels" in parts:
        batch["labels"] = labels = torch.tensor([_padded(tokens[1:], length) for tokens, _ in rows])
        real = torch.tensor([_padded([1] * (len(tokens) - 1), length) for tokens, _ in rows])
        batch["loss_mask"] = (real * (labels != image_token)).float()
        if all(sample.captions is not None for sample in samples):
            batch["captions"] = torch.tensor([_padded(captions[1:], length) for _, captions in rows])
    return batch


def _expanded(sample: Sample, patch: int, image_token: int) -> tuple[list[int], list[int]]:
    """(tokens, the caption that each belongs to), an image token for every patch."""
    if sum(token == IMAGE for token in sample.tokens) != len(sample.images):
        raise ValueError(f"its text has {sum(token == IMAGE for token in sample.tokens)} places for images, but it has {len(sample.images)} images")
    images = iter(sample.images)
    tokens: list[int] = []
    captions: list[int] = []
    numbers = {at: number for number, (begin, end) in enumerate(sample.captions or (), start=1) for at in range(begin, end)}
    for at, token in enumerate(sample.tokens):
        count = 1
        if token == IMAGE:
            image = next(images)
            if image.height % patch or image.width % patch or not (image.height and image.width):
                raise ValueError(f"an image of {image.height} x {image.width} pixels can't be cut into patches of {patch} x {patch}")
            token, count = image_token, image.height // patch * (image.width // patch)
        tokens += [token] * count
        captions += [numbers.get(at, 0)] * count
    if len(tokens) < 2:
        raise ValueError(f"it has {len(tokens)} tokens, but nothing can be learned from fewer than 2")
    return tokens, captions


def _padded(values: list[int], length: int) -> list[int]:
    return values + [0] * (length - len(values))


def _patches(images: Sequence[Image], grids: Sequence[tuple[int, int]], patch: int) -> torch.Tensor:
    most = max((h * w for h, w in grids), default=0)
    channels = images[0].channels if images else 0
    patches = torch.zeros(len(images), most, channels * patch * patch)
    for row, image, (h, w) in zip(patches, images, grids, strict=True):
        cut = image.pixels().reshape(image.channels, h, patch, w, patch)
        row[: h * w] = cut.permute(1, 3, 0, 2, 4).reshape(h * w, -1)
    return patches
