"""A user's own data: the format, what a broken sample does, and what every stage's rank reads alike."""

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

Pillow = pytest.importorskip("PIL.Image")

from rrfp.errors import ConfigurationError  # noqa: E402
from rrfp.multimodal.batch import IMAGE, PARTS  # noqa: E402
from rrfp.multimodal.webdataset import BrokenSample, microbatches, read_sample, write_shards  # noqa: E402

READING = {"tokenize": lambda text: list(text.encode()), "patch": 4, "grid": 6, "channels": 1}


def picture(height, width, kind="PNG", mode="RGB", value=None):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = numpy.random.default_rng(height * width).integers(0, 255, shape) if value is None else numpy.full(shape, value)
    out = io.BytesIO()
    Pillow.fromarray(pixels.astype(numpy.uint8), mode=None).save(out, kind)
    return out.getvalue()


def files(text, *images, **more):
    return {"json": json.dumps({"text": text}).encode(), **{f"{k}.png": image for k, image in enumerate(images)}, **more}


def test_a_sample_is_text_with_images_in_their_order():
    sample = read_sample(files("a <image>b<image>", picture(8, 12), picture(100, 50)), **READING)
    assert list(sample.tokens) == [ord("a"), ord(" "), IMAGE, ord("b"), IMAGE]
    assert [(image.channels, image.height, image.width) for image in sample.images] == [(1, 8, 12), (1, 24, 12)]
    for image in sample.images:
        assert image.pixels().shape == (image.channels, image.height, image.width) and image.pixels().abs().max() <= 1


def test_colours_and_formats():
    white = {"json": b'{"text": "<image>, white"}', "0.jpg": picture(16, 16, "JPEG", value=255)}
    (image,) = read_sample(white, **READING | {"channels": 3}).images
    assert image.pixels().shape == (3, 16, 16) and torch.allclose(image.pixels(), torch.ones(3, 16, 16), atol=0.02)


def test_many_images_are_counted_as_numbers():
    sample = read_sample(files("<image>" * 11 + "x", *(picture(4 * (1 + k % 3), 4) for k in range(11))), **READING)
    assert [image.height for image in sample.images] == [4 * (1 + k % 3) for k in range(11)]


@pytest.mark.parametrize("broken, words", [
    ({"0.png": b""}, "it has no .json"),
    ({"json": b"{"}, "its .json is not like"),
    ({"json": b'{"txt": ""}'}, "KeyError: 'text'"),
    ({"json": b'{"text": 3}'}, "AttributeError"),
    (files("a <image><image>", picture(8, 8)), "its text has 2 <image>, but its images are 0.png"),
    (files("a <image>"), "its images are none"),
    (files("text", picture(8, 8)), "its text has 0 <image>"),
    (files("<image> x", b"not an image"), ".0.png can't be read as an image"),
    (files("<image> x", picture(40, 40)[:-100]), ".0.png can't be read as an image"),
    (files("a"), "shorter than two tokens"),
    (files(""), "shorter than two tokens"),
])
def test_a_broken_sample_says_why(broken, words):
    with pytest.raises(BrokenSample) as error:
        read_sample(broken, **READING)
    assert words in str(error.value) and "\n" not in str(error.value) and "0x" not in str(error.value)


# ------------------------------------------------------------------------------------------------- through Megatron-Energon
DEALING = {"split": "train", "size": 2, "replica": 0, "replicas": 1, "image_token": 256, **READING}
BROKEN = {7: "0.png", 10: "json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """20 samples of 0 to 2 images in two shards, two of them broken, indexed."""
    pytest.importorskip("megatron.energon")
    folder = tmp_path_factory.mktemp("data")

    def samples():
        for k in range(20):
            images = [picture(20 + k, 30) for _ in range(k % 3)]
            sample = files("".join(f"<image> {k}\n" for _ in images) or f"text {k}\n", *images)
            yield sample | ({BROKEN[k]: b"{"} if k in BROKEN else {})

    assert [path.name for path in write_shards(folder, samples(), per_shard=10)] == ["shard-000000.tar", "shard-000001.tar"]
    command = [str(Path(sys.executable).with_name("energon")), "prepare", "--non-interactive", "--split-ratio", "1,0,0", "--sample-type",
               "CrudeWebdataset", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


pin_memory = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")


def numbers(batch) -> list[int]:
    """The samples in a microbatch, by the number in their text."""
    lines = [bytes(token for token in row if token < 256).decode() for row in batch["tokens"].tolist()]
    return [int("".join(filter(str.isdigit, line.strip("\0").split("\n")[0]))) for line in lines]


@pin_memory
def test_a_broken_sample_is_named_and_nothing_else_is_lost(folder, capfd):
    seen = [number for batch in itertools.islice(microbatches(folder, **DEALING, shuffle=0), 27) for number in numbers(batch)]
    assert set(seen) == set(range(20)) - set(BROKEN)
    assert all(seen.count(number) == 3 for number in set(seen)), "three rounds of all others"
    lines = sorted(line for line in capfd.readouterr().err.splitlines() if "broken" in line)
    assert [line.split(" is broken")[0] for line in lines] == [
        f"[rrfp] sample 10 in shard-000001.tar of {folder}", f"[rrfp] sample 7 in shard-000000.tar of {folder}"]


@pin_memory
def test_every_rank_reads_the_same_whatever_it_needs(folder, capfd):
    def loads(parts):
        return [batch["load"] for batch in itertools.islice(microbatches(folder, **DEALING, parts=parts, report=False), 12)]

    assert loads(PARTS) == loads(()) == loads(("grids",)) and "broken" not in capfd.readouterr().err


@pin_memory
def test_replicas_share_and_a_later_start_goes_on(folder):
    whole = [numbers(batch) for batch in itertools.islice(microbatches(folder, **DEALING), 8)]
    later = [numbers(batch) for batch in itertools.islice(microbatches(folder, **DEALING, consumed=6), 5)]
    assert later == whole[3:]
    two = [{number for batch in itertools.islice(microbatches(folder, **DEALING | {"replica": r, "replicas": 2}), 12) for number in numbers(batch)}
           for r in range(2)]
    assert two[0] | two[1] == set(range(20)) - set(BROKEN) and not two[0] & two[1]


def test_broken_samples_alone_are_an_error():
    SkipSample = pytest.importorskip("megatron.energon").SkipSample
    from megatron.energon.source_info import SourceInfo

    from rrfp.multimodal.energon import MOST_BROKEN, Encoder

    def read(files):
        raise BrokenSample("nothing in it")

    encoder = Encoder(read, list, report=False)
    files = {"__sources__": (SourceInfo(dataset_path="data", index="3", shard_name="shard-000000.tar", file_names=()),)}
    for _ in range(MOST_BROKEN - 1):
        with pytest.raises(SkipSample):
            encoder._cook(files)
    with pytest.raises(RuntimeError, match="the last 100 samples were broken, the last of them 3 in shard-000000.tar of data: nothing in it"):
        encoder._cook(files)


def test_a_folder_that_is_not_prepared_is_refused(tmp_path):
    pytest.importorskip("megatron.energon")
    with pytest.raises(ConfigurationError, match="energon prepare"):
        microbatches(tmp_path, **DEALING)


def test_without_energon_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.energon", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rrfp\[energon\]'"):
        microbatches(tmp_path, **DEALING)
