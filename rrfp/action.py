"""Actions and edges, and the one notation for both.

An action is printed as PyTorch's pipelining prints it: stage, kind, microbatch. `2F0` is the forward of microbatch 0 at stage
2, `2B0` its full backward, `2I0` its input gradient, `2W0` its weight gradient. Kinds are an open set: any word in capitals.
"""

import re
from typing import NamedTuple

_ACTION = re.compile(r"(\d+)([A-Z][A-Z_]*)(\d*)")
_EDGE = re.compile(r"(\d+)>(\d+)")


class Action(NamedTuple):
    """One unit of work at one (virtual) stage. `microbatch` is None for kinds that concern a whole stage (`2UNSHARD`)."""

    kind: str
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class Edge(NamedTuple):
    """A directed link between two virtual stages, printed `0>1`. Forward and backward links are different edges."""

    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.source}>{self.destination}"


def parse_action(text: str) -> Action:
    """`2F0` -> Action("F", 2, 0). Raises ValueError that quotes what is not an action."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an action: write stage, kind and microbatch, like 2F0")
    stage, kind, microbatch = match.groups()
    return Action(kind, int(stage), int(microbatch) if microbatch else None)


def parse_edge(text: str) -> Edge:
    """`0>1` -> Edge(0, 1). Raises ValueError that quotes what is not an edge."""
    match = _EDGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an edge: write source>destination, like 0>1")
    return Edge(int(match[1]), int(match[2]))
