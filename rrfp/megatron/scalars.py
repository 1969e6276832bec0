"""A pipeline's waits and memory beside the loss: scalars in TensorBoard and Weights & Biases, through Megatron's own writers.

Megatron opens both writers on the last rank only. At every `--log-interval` each rank of that rank's pipeline leaves a short
record in the job's store, and the last rank writes them once all are there: right after its gradients are final, or after a later
call. Nobody waits for anybody, and nothing happens in other iterations, or in a job without a writer.
"""

import json
import sys

from rrfp.comm.rendezvous import Store
from rrfp.trace.breakdown import Breakdown, combine


class Scalars:
    """One rank's share in the scalars of its pipeline. One thread.

    Args:
        rank, ranks: this rank's place in the pipeline, and the pipeline's size. The last one writes.
        store: the pipeline's key-value store, as `torch.distributed`'s.
    """

    def __init__(self, *, rank: int, ranks: int, store: Store):
        self._rank, self._ranks, self._store = rank, ranks, store
        self._calls: list[Breakdown] = []
        self._logged = 0
        self._pending: tuple[int, str, dict] | None = None
        """(iteration, slot, own record) of what is to be written."""

    def add(self, breakdown: Breakdown) -> None:
        """A call has ended. Training calls count, and are reported together at Megatron's log interval."""
        if breakdown.forward_only or (arguments := _arguments()) is None:
            return
        self._calls.append(breakdown)
        iteration = arguments.curr_iteration + 1  # as Megatron's own scalars of this iteration are numbered
        if iteration % arguments.log_interval:
            return
        self.write()
        self.close()
        # Two slots in turn: a rank that is one report ahead does not overwrite what is still to be read.
        slot, self._logged = f"scalars/{self._logged % 2}", self._logged + 1
        record = {"iteration": iteration} | summary(self._calls)
        self._calls.clear()
        if self._rank < self._ranks - 1:
            self._store.set(f"{slot}/{self._rank}", json.dumps(record).encode())
        else:
            self._pending = iteration, slot, record

    def write(self) -> None:
        """On the last rank: writes what is pending, if every rank has left its record by now."""
        if self._pending is None:
            return
        iteration, slot, record = self._pending
        keys = [f"{slot}/{rank}" for rank in range(self._ranks - 1)]
        if not self._store.check(keys):
            return
        records = [*(json.loads(self._store.get(key)) for key in keys), record]
        if all(other["iteration"] == iteration for other in records):
            self._pending = None
            _write(scalars(records), iteration)

    def close(self) -> None:
        """Writes what is still pending as what it is: the last rank's own. Asks nobody, so it is safe at the end of a job."""
        if self._pending is not None:
            (iteration, _, record), self._pending = self._pending, None
            _write({f"{name}-of-last-rank": value for name, value in scalars([record]).items()}, iteration)


def summary(calls: list[Breakdown]) -> dict[str, float]:
    """What one rank reports of its calls: seconds per call, and the most activations that a stage held."""
    whole = combine(calls)
    blocked = whole.blocked
    times = {"total": whole.total, "waited": sum(blocked.values()), "F": blocked.get("F", 0), "B": blocked.get("B", 0)}
    seconds = {name: value / 1e9 / len(calls) for name, value in times.items()}
    return seconds | {"peak": max(whole.peak_in_flight.values(), default=0)}


def scalars(records: list[dict[str, float]]) -> dict[str, float]:
    """The scalars of a pipeline, from one `summary` per rank.

    The bubble share is the part of a rank's time in the schedule in which it waits, whatever for: the mean over ranks, and the
    largest. Blocked seconds are means over ranks, per call. The peak is the largest.
    """
    shares = [record["waited"] / max(record["total"], 1e-9) for record in records]
    return {
        "rrfp/bubble-share": sum(shares) / len(shares),
        "rrfp/bubble-share-max": max(shares),
        "rrfp/blocked-on-forward-seconds": sum(record["F"] for record in records) / len(records),
        "rrfp/blocked-on-backward-seconds": sum(record["B"] for record in records) / len(records),
        "rrfp/peak-in-flight": max(record["peak"] for record in records),
    }


def _arguments():
    """Megatron's arguments if this is a run of `megatron.training` that has a writer on some rank, else None."""
    training = sys.modules.get("megatron.training.global_vars")  # a job that trains without it has no writers
    try:
        arguments = training.get_args() if training is not None else None
    except AssertionError:  # imported, not initialised
        return None
    wanted = getattr(arguments, "tensorboard_dir", None) or getattr(arguments, "wandb_project", None)
    return arguments if wanted and hasattr(arguments, "curr_iteration") else None


def _write(values: dict[str, float], iteration: int) -> None:
    """To Megatron's writers, of which there are none, one or two on this rank."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    if board := get_tensorboard_writer():
        for name, value in values.items():
            board.add_scalar(name, value, iteration)
    if (wandb := get_wandb_writer()) and wandb.run is not None:  # None once the run is finished
        wandb.log(values, iteration)
