"""Real images with captions, without a download: scikit-learn's handwritten digits (1,797, 8 x 8) and its two photographs.

A sample is a line of text in bytes with 0 to 8 images, each followed by what it shows: a digit's name, or `temple` or `flower` for a piece of
a photograph, whose sides differ from piece to piece. Without an image it is a line of counting. Samples are made by their index: every rank
makes the same.
"""

import functools

import numpy as np
import torch

from rrfp.errors import ConfigurationError
from rrfp.multimodal.batch import IMAGE, Image, Sample

NAMES = "zero one two three four five six seven eight nine".split()
PHOTOGRAPHS = ("temple", "flower")
MOST_IMAGES = 8
VOCABULARY = 256
"""Ids of bytes; the image token comes after them."""
CHANNELS, SIDE, GRID = 1, 8, 6
"""Of a digit; and patches of 4 x 4 along the longest side of a piece of a photograph."""
_SHARE, _HELD_OUT, _SMALLER = 0.15, 5, 12
"""Of pieces of photographs among images; every how manieth digit is held out; by how much photographs are shrunk."""


class Digits:
    """Endless samples of one split. sample = digits[index], for any index.

    Args:
        split: "train"; "valid" or "test", whose images training never sees.
        seed: of which images go together.
        blank: all images black: the control that can only learn the text.
        most: images in a sample, at most.

    Raises:
        ConfigurationError: scikit-learn or Pillow is not installed.
    """

    def __init__(self, split: str, *, seed: int = 0, blank: bool = False, most: int = MOST_IMAGES):
        self._split, self._seed, self._blank, self._most = split, seed, blank, most
        self._images, self._labels = _digits()
        held = np.arange(len(self._images)) % _HELD_OUT == 0
        self._indices = np.flatnonzero(~held if split == "train" else held)

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng([self._seed, ("train", "valid", "test").index(self._split), index])
        count = int(rng.integers(0, self._most + 1))
        if not count:
            start = int(rng.integers(0, 8))
            return Sample(list(f"{' '.join(NAMES[start : start + 3])}\n".encode()), captions=())
        tokens, images, captions = [], [], []
        for _ in range(count):
            pixels, name = self._piece(rng) if rng.random() < _SHARE else self._digit(rng)
            word = name.encode()
            tokens += [IMAGE, ord(" ")]
            captions.append((len(tokens), len(tokens) + len(word)))
            tokens += [*word, ord("\n")]
            if self._blank:
                pixels = np.zeros_like(pixels)
            images.append(Image(CHANNELS, *pixels.shape, functools.partial(_tensor, pixels)))
        return Sample(tokens, images, captions)

    def _digit(self, rng: np.random.Generator) -> tuple[np.ndarray, str]:
        index = rng.choice(self._indices)
        return self._images[index], NAMES[self._labels[index]]

    def _piece(self, rng: np.random.Generator) -> tuple[np.ndarray, str]:
        """A piece of the left part of a photograph; of the right part if it is held out."""
        which = int(rng.integers(len(PHOTOGRAPHS)))
        photograph = _photographs()[which]
        half = photograph.shape[1] // 2 // 4 * 4
        part = photograph[:, :half] if self._split == "train" else photograph[:, half:]
        height, width = (4 * int(rng.integers(2, GRID)) for _ in range(2))
        top, left = (int(rng.integers(0, max(1, most - size + 1))) for most, size in zip(part.shape, (height, width), strict=True))
        piece = part[top : top + height, left : left + width]
        return piece[: piece.shape[0] // 4 * 4, : piece.shape[1] // 4 * 4], PHOTOGRAPHS[which]


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32))[None]


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8] around 0, and what they show."""
    digits = _sklearn().load_digits()
    return (digits.images / 8 - 1).astype(np.float32), digits.target


@functools.cache
def _photographs() -> list[np.ndarray]:
    """The two photographs, grey, shrunk, around 0."""
    try:
        photographs = _sklearn().load_sample_images().images
    except ImportError as error:
        raise ConfigurationError(f"the photographs of scikit-learn can't be read ({error}): pip install 'rrfp[multimodal]'") from error
    found = []
    for photograph in photographs:
        grey = photograph.mean(-1)
        h, w = (size // _SMALLER for size in grey.shape)
        small = grey[: h * _SMALLER, : w * _SMALLER].reshape(h, _SMALLER, w, _SMALLER).mean((1, 3))
        found.append((small / 128 - 1).astype(np.float32))
    return found


def _sklearn():
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ConfigurationError(f"--vlm-data digits: scikit-learn can't be imported ({error}): pip install 'rrfp[multimodal]'") from error
    return datasets
