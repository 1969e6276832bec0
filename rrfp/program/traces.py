"""A trace of real processes, in the words of its program: when each node of the DAG ran."""

from collections.abc import Mapping

from rrfp.errors import ConfigurationError
from rrfp.program.clock import Span
from rrfp.program.dag import RECV, SEND
from rrfp.program.plan import Lowered
from rrfp.trace.files import Timeline


def spans(program: Lowered, timeline: Timeline, call: int | None = None) -> Mapping[str, Span]:
    """When nodes ran in one pipeline (one replica of every rank), in seconds, in the order in which they started.

    Computation and updates are actions; collectives stand as their streams ran them (the action of a reduction only issues it). A
    collective of several ranks lasts from the first of them to the last. SEND and RECV are no spans, but times of messages; a gather of
    ZeRO-3 is brought for whoever reads its bucket next, and is no node.

    Args:
        timeline: of `compile(..., trace=DIRECTORY)`: `rrfp.trace.files.read(DIRECTORY / "pipeline0")`.
        call: which step; None: the last one that all ranks completed.

    Raises:
        ConfigurationError: the trace has no such call, or is not of this program.
    """
    call = timeline.typical_call() if call is None else call
    found: dict[str, Span] = {}

    def add(name: str, start: float, end: float) -> None:
        before = found.get(name, Span(start, end))
        found[name] = Span(min(before.start, start), max(before.end, end))

    for rank, ran in timeline.of_call(call).items():
        nodes = program.plans[rank].nodes if rank < len(program.plans) else {}
        moved = {each.what for each in ran.moved}
        for action, start, end, *_ in ran.actions:
            if action not in nodes:
                raise ConfigurationError(f"the trace is not of this program: rank {rank} has no action {action}")
            if nodes[action].name not in moved:
                add(nodes[action].name, start, end)
        for _, what, start, end in ran.moved:
            if what in program.dag.nodes and program.dag.nodes[what].kind not in (SEND, RECV):
                add(what, start, end)
    return dict(sorted(found.items(), key=lambda item: item[1]))
