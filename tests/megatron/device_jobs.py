"""Jobs on a fake GPU: what a runtime does where tensors are not the host's, each process with a machine of its own."""

import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import model as gpt
import torch
from jobs import DELAYS, JOBS, job, model_for, reference, schedule

from rrfp.engine.launches import Launches
from rrfp.megatron import executor
from rrfp.megatron import runtime as runtimes

sys.path.insert(0, str(Path(__file__).parent.parent / "fakes"))
from fake_cuda import FakeDevice, Machine  # noqa: E402


@contextmanager
def fake_device(seed, **options):
    """What `find_device` finds, for the runtimes that are made meanwhile."""
    machine = Machine(seed=seed, **options).start()
    device = FakeDevice(machine)
    with mock.patch.object(runtimes, "find_device", lambda options: device):
        runtimes.close_all()
        try:
            yield device
        finally:
            runtimes.close_all()
            machine.stop()


@job
def same_on_a_device(*, microbatches, seeds, options, pace=0.0, steps=2, **settings):
    """As `same`, with payloads, completions and times by way of a device."""
    expected = reference(microbatches, steps=steps, **settings)
    model, optimizer, state = model_for(**settings)
    for seed in seeds:
        DELAYS.seed, DELAYS.longest = seed, 0.0
        with fake_device(seed, pace=pace):
            state.restore()
            got = gpt.train(schedule(**options), model, optimizer, microbatches, steps=steps)
        if (where := gpt.difference(expected, got)) is not None:
            return f"seed {seed}, {options}: {where}"
    return None


@job
def on_a_device(*, run, seed=0, **arguments):
    """Another job, by way of a device."""
    with fake_device(seed):
        return JOBS[run](**arguments)


@job
def hasty_on_a_device(*, microbatches):
    """As `same_on_a_device`, but an action counts as completed when it has been launched. The group cannot go on after it."""
    def finish(self, running, outputs, done, *, lengthen=0.0):
        done(outputs)

    with mock.patch.object(Launches, "finish", finish):
        return same_on_a_device(microbatches=microbatches, seeds=[0], options={"transport": "host"}, pace=0.03, steps=1)


@job
def waits_on_a_device(*, microbatches, hasty=False):
    """What in a call waits for a whole device, by name and how often; and how often something waited for one event.

    hasty: the executor synchronises, as a control.
    """
    counts = {"synchronize": 0, "item": 0, "empty_cache": 0}
    inside = False

    def counting(name, function):
        def counted(*arguments, **keywords):
            # Megatron's tracker of random states compares those of the CPU's generator.
            counts[name] += inside and not sys._getframe(1).f_code.co_filename.endswith("tensor_parallel/random.py")
            return function(*arguments, **keywords)

        return counted

    act = executor.MegatronExecutor._act

    def watched(self, action, tensors):
        if hasty:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return act(self, action, tensors)

    run = runtimes.Engine.run

    def watched_run(self, *arguments, **keywords):
        nonlocal inside
        inside = True
        try:
            return run(self, *arguments, **keywords)
        finally:
            inside = False

    model, optimizer, state = model_for()
    state.restore()
    with (
        mock.patch.object(torch.cuda, "synchronize", counting("synchronize", lambda *_: None)),
        mock.patch.object(torch.cuda, "empty_cache", counting("empty_cache", lambda: None)),
        mock.patch.object(torch.Tensor, "item", counting("item", torch.Tensor.item)),
        mock.patch.object(runtimes.Engine, "run", watched_run),
        mock.patch.object(executor.MegatronExecutor, "_act", watched),
        fake_device(1) as device,
    ):
        gpt.train(schedule(), model, optimizer, microbatches, steps=2)
    return counts, device.waits


@job
def traced_on_a_device(*, microbatches, folder, seconds):
    """A call whose actions the device lengthens by `seconds`: the breakdown of the last call, as (compute, padded, total) in seconds."""
    model, optimizer, state = model_for()
    state.restore()
    with mock.patch.object(DELAYS, "on_device", lambda call, action, took: seconds), fake_device(1):
        gpt.train(schedule(trace=folder), model, optimizer, microbatches, steps=1)
        last = next(iter(runtimes._runtimes.values())).recorder.last_call
    return last.compute / 1e9, last.emulated / 1e9, last.total / 1e9


@job
def breaks_on_a_device(*, microbatches):
    """The error that every rank has when rank 0's device breaks in a call. The group cannot go on after it."""
    model, optimizer, state = model_for()
    state.restore()
    with fake_device(1) as device:
        act = executor.MegatronExecutor._act

        def breaking(self, action, tensors):
            if torch.distributed.get_rank() == 0 and action.microbatch == 2:
                device.machine.break_down("CUDA error: an illegal memory access was encountered")
            return act(self, action, tensors)

        with mock.patch.object(executor.MegatronExecutor, "_act", breaking):
            try:
                gpt.train(schedule(), model, optimizer, microbatches, steps=1)
            except Exception as error:
                return str(error).splitlines()[0]
    return None
