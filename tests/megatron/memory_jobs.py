"""Jobs about limits that are measured. An activation is made large by ballast that autograd keeps; the kernel says what memory is taken.

Blocks of a MiB and more are mapped and unmapped one by one here, so that what a process has resident follows what it holds.
"""

import ctypes
import os
from pathlib import Path
from unittest import mock

import model as gpt
import torch
from jobs import DELAYS, job, model_for, reference, schedule

from rrfp.errors import ConfigurationError
from rrfp.megatron import limits, memory
from rrfp.megatron import runtime as runtimes
from rrfp.simulate.memory import Choice

BALLAST = 4 << 20
DELAY = 0.008
"""Seconds that actions last longer at most; messages are late by twice that. So more activations help."""
_M_MMAP_THRESHOLD = -3


class _Ballast(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        context.save_for_backward(torch.ones(BALLAST, dtype=torch.uint8))
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient


def heavy(data_iterator, model):
    """Megatron's forward step, whose activation holds `BALLAST` bytes more. The numbers are the same."""
    output, loss_func = gpt.forward_step(data_iterator, model)
    return _Ballast.apply(output), loss_func


def resident(name="VmRSS"):
    return memory._status(name)


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


@job
def measured(
    *, options, calls, budget=None, spoilt=False, compare=False, update=True, longest=10, surprise=None, greedy=False, unaware=False, **settings,
):
    """Calls of (microbatches, forward only) under `options`; what each was limited to, and how much memory it took beyond what was held before.

    budget: activations' worth of memory that is idle at rank r of the job, by rank; None: what the host has.
    spoilt: what is measured is halved. compare: with Megatron's own schedule; all calls are then of the same microbatches, and train.
    surprise: the call before which a GiB turns out to have been taken. update: whether the optimizer steps.
    greedy: `auto` takes all that fits, whatever simulation says of times that other work on the machine may have disturbed.
    longest: calls after which that is not waited for any more. unaware: frozen stages are taken for ones that hold something.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    runtimes.close_all()  # what is frozen is agreed on once per connection
    model, optimizer, state = model_for(**settings)
    expected = reference(calls[0][0], steps=len(calls), **settings) if compare else None
    DELAYS.seed, DELAYS.longest = 1, DELAY
    state.restore()
    function, iterator, results, seen = schedule(**options), gpt.iterators(), [], []
    said = []
    peaks = []  # the kernel's is forgotten before each call
    with mock.patch.object(memory.Host, "budget", lambda self, fraction: _budget(self, fraction, budget)), \
            mock.patch.object(limits, "_LONGEST", longest), \
            mock.patch.object(limits, "print", lambda *text, **_: said.append(" ".join(text)), create=True), \
            mock.patch.object(limits, "holding", _all_hold if unaware else limits.holding), \
            mock.patch.object(limits, "choose", _all_that_fits if greedy else limits.choose), \
            mock.patch.object(memory.Host, "peak", lambda self: max([resident("VmHWM"), *peaks]) + (surprise == len(seen)) * limits.GIB), \
            mock.patch.object(memory.Meter, "activation", _halved if spoilt else memory.Meter.activation):
        try:
            for count, forward_only in calls:
                forget_peak()
                before = resident()
                results.append(gpt.step(function, model, optimizer, iterator, count, forward_only=forward_only, update=update,
                                        forward_step_func=heavy))
                [runtime] = {id(each): each for each in runtimes._runtimes.values()}.values()
                scheduler = runtime.engine.scheduler
                peaks.append(resident("VmHWM"))
                seen.append({"limit": scheduler.limit, "held": scheduler.peak_in_flight, "memory": peaks[-1] - before, "mode": runtime.recorder.mode})
        except ConfigurationError as error:
            return str(error)
    difference = None
    if compare:
        results.append({"weights": {name: p.detach().clone() for name, p in gpt.named(model)}})
        difference = gpt.difference(expected, results)
    return {"calls": seen, "difference": difference, "said": said}


def _all_hold(placement, first_trainable):
    return [True] * placement.ranks


def _all_that_fits(policy, costs, most, *, seconds):
    return Choice(tuple(most), 1.0, 1.0, 1)


REAL_BUDGET = memory.Host.budget
_halved = property(lambda meter, real=memory.Meter.activation: real.fget(meter) // 2)


def _budget(host, fraction, activations):
    if activations is None:
        return REAL_BUDGET(host, fraction)
    return host.peak() + activations[int(os.environ["RANK"])] * BALLAST

