"""Bytes of parameters, gradients and optimizer states on each device, by what is replicated and sharded. Activations are not in it."""

from dataclasses import dataclass

from rrfp.program.communicate import nbytes
from rrfp.program.dag import UPDATE
from rrfp.program.gathers import uses
from rrfp.program.order import rows
from rrfp.program.plan import Lowered

ADAM = 2.0
"""Optimizer states per parameter, in parameters: Adam's two moments, of the parameters' type."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    pool: ZeRO-3's gathered buckets: the most that prefetch + 1 consecutive ones of the order take.
    scattered: from ZeRO-2 on, whole gradients of the largest bucket twice: of one microbatch while they are scattered, of another
        while they are made.
    """

    parameters: int
    gradients: int
    optimizer: int
    pool: int
    scattered: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.pool + self.scattered


def memory(program: Lowered, rank: int, *, optimizer: float = ADAM) -> Memory:
    """What a device of `rank` holds.

    ZeRO-0: all of parameters, gradients and states. ZeRO-1: 1/n of the states, and 1/n of the gradients more (the sum over replicas);
    ZeRO-2: 1/n of the gradients, and two whole buckets of them; ZeRO-3: 1/n of the parameters too, and prefetch + 1 whole buckets of them.

    Args:
        optimizer: bytes of optimizer states per byte of parameters.
    """
    dag, plan = program.dag, program.plans[rank]
    bucket_of = {name: bucket for bucket in dag.buckets.values() for name in bucket.segments}
    trained = {node.what for node in dag.of(UPDATE)}
    parameters = gradients = states = 0.0
    scattered = 0
    for name in {node.what for node in plan.nodes.values()} & set(dag.segments):
        size, bucket = nbytes(dag, name), bucket_of.get(name)
        zero = bucket.zero if bucket else 0
        replicas = len(plan.devices) // dag.sharded.get(name, 1)
        parameters += size / (replicas if zero >= 3 else 1)
        if name in trained:
            gradients += size * (zero < 2) + size / replicas * (zero >= 1)
            states += optimizer * size / (replicas if zero >= 1 else 1)
            if zero >= 2:
                scattered = max(scattered, 2 * bucket.nbytes)
    row = [node for group in rows(dag)[plan.devices] for node in group]
    gathered = [dag.buckets[use.bucket] for use in uses(dag, row)]
    pool = max((sum(b.nbytes for b in gathered[at:at + gathered[at].prefetch + 1]) for at in range(len(gathered))), default=0)
    return Memory(round(parameters), round(gradients), round(states), pool, scattered)
