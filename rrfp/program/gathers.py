"""ZeRO-3: which gathers a device needs, when each may start, and so how many gathered buckets it holds at most.

Without a bound every gather could start at once, and all parameters would lie on every device. So the n-th use of a gathered bucket is
numbered in the order of computation, and its gather waits until use n - prefetch - 1 has run: prefetch + 1 buckets are held.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rrfp.program.dag import ALL_GATHER, DAG, TEMPORAL, Node
from rrfp.program.order import rows


class Use(NamedTuple):
    """Computations that follow each other and read one gathered bucket."""

    bucket: str
    gathers: tuple[str, ...]
    nodes: tuple[str, ...]


def bound_gathers(dag: DAG) -> DAG:
    """Drop gathers of what is gathered already, and add temporal edges that keep the rest within prefetch + 1 buckets."""
    if not any(bucket.zero == 3 for bucket in dag.buckets.values()):
        return dag
    draft = dag.edit()
    for row in rows(dag).values():
        found = list(uses(dag, [node for group in row for node in group]))
        for index, use in enumerate(found):
            first = use.gathers[0]
            for other in use.gathers[1:]:
                draft.move(dag.outgoing[other], [edge._replace(source=first) for edge in dag.outgoing[other]])
                del draft.nodes[other]
            # Released is what the whole of an earlier use has read.
            ahead = index - dag.buckets[use.bucket].prefetch - 1
            if ahead >= 0:
                for name in found[ahead].nodes:
                    draft.link(name, first, TEMPORAL)
    return draft.dag()


def uses(dag: DAG, row: list[Node]) -> Iterator[Use]:
    """The uses of gathered buckets by a device's computation, in its order; those next to each other are one."""
    open_: Use | None = None
    for node in row:
        for gather in dag.before(node.name):
            if gather.kind != ALL_GATHER or dag.bucket_of(gather).zero != 3:
                continue
            bucket = gather.what.partition(".")[0]
            if open_ is not None and open_.bucket == bucket:
                open_ = Use(bucket, (*open_.gathers, gather.name), (*open_.nodes, node.name))
            else:
                if open_ is not None:
                    yield open_
                open_ = Use(bucket, (gather.name,), (node.name,))
    if open_ is not None:
        yield open_

