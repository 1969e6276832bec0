"""A case on real processes against one process."""

import functools

import numpy as np

from tests.program.execute import jobs


@functools.cache
def reference(which: tuple, rows: int, pieces: int, optimizer: str, steps: int) -> list:
    """Per step every piece's loss, and after it in turn every gradient, and all parameters (`jobs.Shown`)."""
    found = jobs.subject(which).reference(jobs.batches(which, rows, steps), pieces, optimizer)
    return [(losses.numpy(), {name: value.numpy() for name, value in parameters.items()}) for losses, parameters in found]


def worst(group, which: tuple, directives: list, *, replicas: int, pieces: int, modes: list[str], optimizer: str = "sgd", rows: int = 2, **options):
    """(the largest difference over all ranks and steps, every rank's peak). pieces: microbatches of all replicas. rows: of each."""
    total = rows * pieces
    ranks = group.run("train", which=which, directives=directives, replicas=replicas, rows=total, optimizer=optimizer, modes=modes, **options)
    largest = 0.0
    for step, (losses, parameters) in enumerate(reference(which, total, pieces, optimizer, len(modes))):
        held = set()
        for rank, (found, _) in enumerate(ranks):
            own = losses.reshape(replicas, -1)[rank % replicas]
            assert found[step][0].shape == own.shape, "every microbatch's loss, on every rank"
            largest = max(largest, np.abs(found[step][0] - own).max())
            for name, value in found[step][1].items():
                largest = max(largest, np.abs(value - parameters[name]).max())
                held.add(name)
        assert held == set(parameters), "every parameter lies somewhere"
    return largest, [peak for _, peak in ranks]
