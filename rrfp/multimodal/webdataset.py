"""A user's own text with images: a WebDataset, read by Megatron-Energon.

A sample is the files of one key in a shard: `KEY.json`, {"text": "... <image> ..."}, and one image per `<image>`, numbered from 0 in their
order: `KEY.0.png`, `KEY.1.jpg`, in any format that Pillow reads. `write_shards` writes such, and `energon prepare` indexes them.
"""

import functools
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from rrfp.errors import ConfigurationError
from rrfp.multimodal.arguments import check_data
from rrfp.multimodal.batch import IMAGE, Image, Sample, collate

MARK = "<image>"


class BrokenSample(ValueError):
    """A sample can't be used; says why."""


def read_sample(files: Mapping[str, bytes], *, tokenize: Callable[[str], Sequence[int]], patch: int, grid: int, channels: int) -> Sample:
    """The sample in `files`, by the part of their names after the key: `json`, `0.png`, ...

    An image keeps its proportions; it is scaled so that its sides are whole patches, `grid` of them at most.

    Args:
        tokenize: ids of a text.
        patch: side of a patch in pixels. channels: 1 for grey, 3 for colours.

    Raises:
        BrokenSample: a file is missing or can't be read, or text and images don't belong together.
    """
    if "json" not in files:
        raise BrokenSample("it has no .json")
    try:
        text = json.loads(files["json"])["text"]
        parts = text.split(MARK)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenSample(f'its .json is not like {{"text": "..."}} ({type(error).__name__}: {error})') from None
    numbered = {name.partition(".")[0]: name for name in files if name.partition(".")[0].isdecimal()}
    if sorted(numbered, key=int) != [str(number) for number in range(len(parts) - 1)]:
        raise BrokenSample(f"its text has {len(parts) - 1} {MARK}, but its images are {', '.join(sorted(numbered.values())) or 'none'}")
    images = [_image(files[numbered[str(k)]], numbered[str(k)], patch, grid, channels) for k in range(len(parts) - 1)]
    tokens: list[int] = []
    for number, part in enumerate(parts):
        tokens += [IMAGE] * bool(number)
        tokens += list(tokenize(part)) if part else []
    if len(tokens) + sum(image.height * image.width // patch**2 - 1 for image in images) < 2:
        raise BrokenSample("its text is shorter than two tokens")
    return Sample(tokens, images)


def _image(data: bytes, name: str, patch: int, grid: int, channels: int) -> Image:
    from PIL import Image as Pillow

    try:
        picture = Pillow.open(io.BytesIO(data)).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # whatever the format's reader raises
        raise BrokenSample(f".{name} can't be read as an image ({type(error).__name__}: {str(error).partition(' <')[0]})") from None
    scale = min(1.0, grid * patch / max(picture.size))
    width, height = (min(grid, max(1, round(side * scale / patch))) * patch for side in picture.size)
    pixels = np.asarray(picture.resize((width, height), Pillow.Resampling.BILINEAR), dtype=np.float32)
    return Image(channels, height, width, functools.partial(_tensor, pixels.reshape(height, width, channels)))


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)


def microbatches(
    path: str | Path, *, split: str, size: int, replica: int, replicas: int, tokenize: Callable[[str], Sequence[int]], grid: int, channels: int,
    workers: int = 0, shuffle: int = 100, seed: int = 0, report: bool = True, consumed: int = 0, **collating,
) -> Iterator[dict]:
    """A data-parallel replica's microbatches, endless, from a dataset that `energon prepare` has indexed.

    A broken sample is left out, on every rank alike, with a line that names it; the microbatch is filled up with the next. For that each
    rank that reads samples decodes all of their images, also where it needs only their sizes.

    Args:
        path: of the dataset. split: "train", "val" or "test".
        size, replica, replicas, consumed, collating: as `rrfp.multimodal.loader.microbatches`; what was consumed is read again and dropped.
        tokenize, grid, channels: as `read_sample`.
        workers: loader processes. shuffle: samples among which training picks at random, 0 for none.
        seed: of the order, with `replica` and `workers`.
        report: whether this rank says which samples are broken.

    Raises:
        ConfigurationError: Megatron-Energon is not installed, or the dataset is not prepared.
    """
    try:
        from megatron.energon import WorkerConfig, get_loader, get_train_dataset
        from megatron.energon.errors import reraise_exception

        from rrfp.multimodal.energon import Encoder
    except ImportError as error:
        raise ConfigurationError(f"--vlm-data {path}: Megatron-Energon can't be imported ({error}): pip install 'rrfp[energon]'") from error
    check_data(str(path))
    read = functools.partial(read_sample, tokenize=tokenize, patch=collating["patch"], grid=grid, channels=channels)
    config = WorkerConfig(rank=replica, world_size=replicas, num_workers=workers, seed_offset=seed,
                          global_error_handler=reraise_exception)
    dataset = get_train_dataset(
        path, split_part=split, worker_config=config, batch_size=size,
        shuffle_buffer_size=shuffle if shuffle and split == "train" else None,
        max_samples_per_sequence=None, task_encoder=Encoder(read, functools.partial(collate, **collating), report=report))
    batches = iter(get_loader(dataset))
    for _ in range(consumed // (size * replicas)):
        next(batches)
    return batches


def write_shards(folder: Path, samples: Iterable[Mapping[str, bytes]], *, per_shard: int = 1000) -> list[Path]:
    """Write samples, each by the part of its files' names after the key, as `folder`/shard-000000.tar and so on; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    shard = None
    try:
        for number, files in enumerate(samples):
            if number % per_shard == 0:
                if shard is not None:
                    shard.close()
                paths.append(folder / f"shard-{len(paths):06}.tar")
                shard = tarfile.open(paths[-1], "w")
            for name, data in files.items():
                entry = tarfile.TarInfo(f"{number:09}.{name}")
                entry.size = len(data)
                shard.addfile(entry, io.BytesIO(data))
    finally:
        if shard is not None:
            shard.close()
    return paths
