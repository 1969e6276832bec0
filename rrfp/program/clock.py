"""When each node of a training DAG runs, given what each takes: streams as resources, every edge obeyed, nothing run for real.

A stream of a device does one thing at a time. Computation goes in the order of its row; inside a group of several sub-DAGs, whichever
is ready. Other streams serve what is ready first. The order in which nodes start, at nominal durations, is the order in which a plan
issues them: one total order for all devices, so that no two of them wait for each other's collectives.
"""

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rrfp.program.dag import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPUTE, DAG, RECV, REDUCE_SCATTER, SEND, UPDATE, Node
from rrfp.program.order import rows

Duration = Callable[[Node], float]
_NOMINAL = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, ALL_TO_ALL: 0.5, ALL_REDUCE: 0.5, REDUCE_SCATTER: 0.5, ALL_GATHER: 0.25, SEND: 0.1,
            RECV: 0.0, UPDATE: 0.1}


class Span(NamedTuple):
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """Spans by node, in the order in which the nodes started."""

    spans: Mapping[str, Span]

    @property
    def makespan(self) -> float:
        return max((span.end for span in self.spans.values()), default=0.0)


def nominal(node: Node) -> float:
    """Durations in units of one segment's forward: B 2, I and W 1, an all-to-all 0.5, a message 0.1."""
    return _NOMINAL[node.phase if node.kind == COMPUTE else node.kind]


def run(dag: DAG, duration: Duration = nominal) -> Run:
    """Run the whole DAG under a virtual clock. Devices of one group do the same at once, so a group's stream is one resource."""
    return _Clock(dag, duration).run()


class _Clock:
    def __init__(self, dag: DAG, duration: Duration):
        self._dag, self._duration = dag, duration
        position = {name: index for index, name in enumerate(dag.topological)}
        ordered = [node.name for row in rows(dag).values() for group in row for node in group]
        self._rank = position | {name: index for index, name in enumerate(ordered)}
        self._lacking = {name: len(edges) for name, edges in dag.incoming.items()}
        home = {device: node.devices for node in dag.of(COMPUTE) for device in node.devices}
        self._streams = {name: tuple(dict.fromkeys((home[device], node.stream) for device in node.devices))
                         for name, node in dag.nodes.items()}
        self._waiting: dict[tuple, list[str]] = {}
        """By stream what is ready, in no order."""
        self._ready_at: dict[str, float] = {}
        self._busy: set[tuple] = set()
        self._last: dict[tuple, str] = {}
        self._exchanges_left: dict[tuple, int] = {}
        self._computing_left: dict[tuple, int] = {}
        for name, node in dag.nodes.items():
            for stream in self._streams[name]:
                self._waiting.setdefault(stream, [])
                self._exchanges_left[stream] = self._exchanges_left.get(stream, 0) + (node.kind == ALL_TO_ALL)
                self._computing_left[stream] = self._computing_left.get(stream, 0) + (node.kind == COMPUTE)
        self._spans: dict[str, Span] = {}
        self._ends: list[tuple[float, int, str]] = []

    def run(self) -> Run:
        touched = {stream for name, count in self._lacking.items() if not count for stream in self._make_ready(name, 0.0)}
        now = 0.0
        while True:
            for stream in sorted(touched):
                self._serve(stream, now)
            if not self._ends:
                break
            now, touched = self._ends[0][0], set()
            while self._ends and self._ends[0][0] == now:
                touched |= self._finish(heapq.heappop(self._ends)[2], now)
        return Run(self._spans)

    def _make_ready(self, name: str, now: float) -> tuple:
        self._ready_at[name] = now
        for stream in self._streams[name]:
            self._waiting[stream].append(name)
        return self._streams[name]

    def _finish(self, name: str, now: float) -> set:
        touched = set(self._streams[name])
        self._busy -= touched
        for edge in self._dag.outgoing[name]:
            self._lacking[edge.destination] -= 1
            if not self._lacking[edge.destination]:
                touched |= set(self._make_ready(edge.destination, now))
        return touched

    def _serve(self, stream: tuple, now: float) -> None:
        """Start what this stream does next, if it is free and so are the others that the node needs."""
        if stream in self._busy:
            return
        for name in sorted(self._waiting[stream], key=self._priority):
            if self._may_start(stream, name) and not self._busy.intersection(self._streams[name]):
                self._start(name, now)
                return

    def _priority(self, name: str) -> tuple:
        node = self._dag.nodes[name]
        if node.kind == COMPUTE:
            return (0, self._rank[name])
        if self._slotted(node):
            return (2, self._ready_at[name], self._rank[name])
        return (1, self._ready_at[name], self._rank[name])

    def _may_start(self, stream: tuple, name: str) -> bool:
        node = self._dag.nodes[name]
        if node.kind == UPDATE:
            return not self._computing_left[stream]  # when the device's backwards are through
        if self._slotted(node) and self._exchanges_left[stream]:
            last = self._last.get(stream)
            return last is not None and self._dag.nodes[last].kind == ALL_TO_ALL
        return True

    def _slotted(self, node: Node) -> bool:
        return node.kind in (ALL_REDUCE, REDUCE_SCATTER) and node.what in self._dag.buckets and self._dag.bucket_of(node).slotted

    def _start(self, name: str, now: float) -> None:
        node = self._dag.nodes[name]
        for stream in self._streams[name]:
            self._waiting[stream].remove(name)
            self._busy.add(stream)
            self._last[stream] = name
            self._exchanges_left[stream] -= node.kind == ALL_TO_ALL
            self._computing_left[stream] -= node.kind == COMPUTE
        self._spans[name] = Span(now, now + self._duration(node))
        heapq.heappush(self._ends, (self._spans[name].end, self._rank[name], name))


def paired(dag: DAG) -> Mapping[str, frozenset[str]]:
    """The all-to-alls of sub-DAGs that an order runs interleaved with others -> the computation of those others."""
    found: dict[str, frozenset[str]] = {}
    for row in rows(dag).values():
        for group in row:
            parts: dict[tuple, set[str]] = {}
            for node in group:
                parts.setdefault(_part(node), set()).add(node.name)
            for node in group if len(parts) > 1 else ():
                for other in (*dag.before(node.name), *dag.after(node.name)):
                    if other.kind == ALL_TO_ALL:
                        found[other.name] = frozenset().union(*(names for part, names in parts.items() if part != _part(other)))
    return found


def _part(node: Node) -> tuple:
    """Which pass of which piece of the batch it belongs to."""
    return (node.phase, *node.dims.items())


def overlap(dag: DAG, spans: Mapping[str, Span], under: Mapping[str, Collection[str]] | None = None) -> float:
    """The share of the time of all-to-alls during which their devices compute.

    Args:
        spans: of a virtual clock (`run`) or of a trace (`rrfp.program.traces.spans`).
        under: by all-to-all, the computation that counts, as `paired` gives it. None: all of them, and all computation of their
            devices. An all-to-all does not wait for computation of its own sub-DAG, so what lies over it is other work.
    """
    if under is None:
        computing: dict[tuple[int, ...], list[str]] = {}
        for node in dag.of(COMPUTE):
            computing.setdefault(node.devices, []).append(node.name)
        under = {node.name: computing.get(node.devices, ()) for node in dag.of(ALL_TO_ALL)}
    whole = covered = 0.0
    for name, names in under.items():
        start, end = spans[name]
        whole += end - start
        covered += sum(max(0.0, min(end, spans[other].end) - max(start, spans[other].start)) for other in names)
    return covered / whole if whole else 0.0
