"""What the jobs of a `Group`'s processes share: each is a function of keyword arguments; every rank runs it; its value is the rank's result."""

import faulthandler
import json
import os
import pickle
import random
import sys
import time
import traceback
from contextlib import contextmanager
from multiprocessing.connection import Client
from pathlib import Path

import torch

from rrfp.megatron import cpu

cpu.enable()
cpu.patch_megatron()
torch.set_num_threads(1)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

import model as gpt  # noqa: E402
from rrfp.megatron import runtime as runtimes  # noqa: E402
from rrfp.megatron import split_backward  # noqa: E402
from rrfp.megatron.forward_backward import make_forward_backward  # noqa: E402
from rrfp.megatron.options import Options  # noqa: E402

OWN = schedules.forward_backward_pipelining_without_interleaving
OWN_INTERLEAVED = schedules.forward_backward_pipelining_with_interleaving
JOBS = {}


def job(function):
    JOBS[function.__name__] = function
    return function


class RandomDelays:
    """Delays actions and messages at random, differently on each rank: readiness comes in an order that no list foresaw. A `Padding`."""

    def __init__(self):
        self.seed, self.longest = 0, 0.0

    def begin(self, call, microbatches):
        self._call = call

    def start(self):
        pass

    def finish(self, call, action):
        return self._sleep(f"{self.seed}/{call}/{action}")

    def _sleep(self, key):
        rng = random.Random(f"{os.environ['RANK']}/{key}")
        pause = self.longest * rng.random() if rng.random() < 0.5 else 0.0
        if pause:
            time.sleep(pause)
        return pause

    def on_device(self, call, action, took):
        return 0.0

    def delay(self, edge, microbatch):
        rng = random.Random(f"{os.environ['RANK']}/{self.seed}/{self._call}/{edge}/{microbatch}")
        return 2 * self.longest * rng.random() if rng.random() < 0.4 else 0.0

    def summary(self):
        return "random delays"


DELAYS = RandomDelays()
runtimes.make_padding = lambda options, *, stages: DELAYS
_models = {}


def model_for(**settings):
    key = repr(sorted(settings.items()))
    if key not in _models:
        built = gpt.build(**settings)
        _models[key] = (*built, gpt.State(*built))
    return _models[key]


@contextmanager
def splitting():
    """Models built inside can split their backward, as after `rrfp.install(split_backward=True)`."""
    undo = []

    def replace(owner, name, value):
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    split_backward.install(replace)
    try:
        yield
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)


def schedule(**options):
    """Our schedule with these options."""
    interleaved = own() is OWN_INTERLEAVED
    return make_forward_backward(Options(timeout=60.0, **options), original=own(), interleaved=interleaved)


def own():
    """Megatron's own schedule for this layout."""
    return OWN if parallel_state.get_virtual_pipeline_model_parallel_world_size() is None else OWN_INTERLEAVED


_references = {}


def reference(microbatches, *, steps=3, **settings):
    """What Megatron's own 1F1B gives, once per setting."""
    key = (microbatches, steps, repr(sorted(settings.items())))
    if key not in _references:
        model, optimizer, state = model_for(**settings)
        state.restore()
        _references[key] = gpt.train(own(), model, optimizer, microbatches, steps=steps)
    return _references[key]


def main():
    settings = json.loads(sys.argv[1])
    faulthandler.enable()
    folder, rank = Path(settings["folder"]), int(os.environ["RANK"])
    pipe = Client(settings["door"])
    pipe.send(rank)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=settings["pipeline"], **settings["layout"])
    while pipe.poll(600):
        try:
            name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:  # no more jobs
            break
        try:
            result = (True, JOBS[name](**arguments))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
    else:
        sys.exit("no job came")
    runtimes.close_all()
    torch.distributed.destroy_process_group()

