"""What Megatron-Energon does with our samples. Importing it imports megatron.energon, an optional package."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron.energon import Cooker, SkipSample, TaskEncoder, basic_sample_keys, stateless
from megatron.energon.flavors.base_dataset import Sample as EnergonSample

from rrfp.multimodal.batch import Sample
from rrfp.multimodal.webdataset import BrokenSample

MOST_BROKEN = 100
"""So many broken samples in a row are no accident: reading fails."""


@dataclass
class Read(EnergonSample):
    """A sample of ours, as one of Energon's."""

    sample: Sample


class Encoder(TaskEncoder):
    """Reads samples from the bytes of their files, leaves out broken ones, and collates the others.

    read: files by the part of their names after the key -> sample. collate: samples -> microbatch.
    report: whether to say which samples are broken: each once, in one line that names it.
    """

    decoder = None  # bytes as they are: what can't be read is ours to say

    def __init__(self, read: Callable[[Mapping[str, bytes]], Sample], collate: Callable[[Sequence[Sample]], dict],
                 *, report: bool = True):
        super().__init__()
        self._read, self._collate, self._report = read, collate, report
        self._said: set[str] = set()
        self._broken = 0
        self.cookers = [Cooker(self._cook)]

    @stateless
    def _cook(self, files: dict) -> Read:
        wanted = {name: data for name, data in files.items() if not name.startswith("__")}
        try:
            sample = self._read(wanted)
        except BrokenSample as error:
            self._leave_out(files, error)
        self._broken = 0
        return Read(**basic_sample_keys(files), sample=sample)

    def _leave_out(self, files: dict, error: BrokenSample) -> None:
        """Raises SkipSample, which Energon takes without a word: the next sample comes instead."""
        place = ", ".join(f"{source.index} in {source.shard_name} of {source.dataset_path}" for source in files["__sources__"])
        if self._report and place not in self._said:
            print(f"[rrfp] sample {place} is broken and left out: {error}", file=sys.stderr, flush=True)
        self._said.add(place)
        self._broken += 1
        if self._broken == MOST_BROKEN:
            raise RuntimeError(f"the last {MOST_BROKEN} samples were broken, the last of them {place}: {error}")
        raise SkipSample

    @stateless
    def batch(self, samples: list[Read]) -> dict:
        return self._collate([one.sample for one in samples])
