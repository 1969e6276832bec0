"""A training DAG as text, and back: one line per fact, in an order that reads as it runs.

    program 1
    dim MB 2
    tensor h float32 8x64 batch 0
    segment layer0 {PP=0} in batch out h parameters layer0.weight
    bucket bucket0 16384 zero 0 part 0/1 prefetch 1 of layer0
    shard experts0 4
    node F:layer0[MB=0] {PP=0} on 0 stream compute
      < F:embed[MB=0] h              a data edge: from where, and what
      ~ B:layer0[MB=1]               a temporal edge

A line that begins with # says nothing. A field that is empty is left out. `print_dag(parse_dag(text)) == text`, and
`parse_dag(print_dag(dag)) == dag` for a `DAG.sorted`.
"""

import re
from collections.abc import Iterator, Mapping

from rrfp.errors import ConfigurationError
from rrfp.program.dag import COMPUTE, DAG, DATA, KINDS, PASSES, TEMPORAL, Bucket, Edge, Node
from rrfp.program.traced import Segment, Tensor

HEADER = "program 1"
_NODE = re.compile(r"([A-Z_:]+):([\w.>]+)(?:\[([^\]]*)\])?")
_SHAPE = re.compile(r"(\d+(?:x\d+)*)|-")


def print_dag(dag: DAG) -> str:
    """The text of a DAG. Each node stands with the edges that lead to it."""
    lines = [HEADER]
    lines += [f"dim {dim} {count}" for dim, count in dag.dims.items()]
    for name, tensor in dag.tensors.items():
        lines.append(_join("tensor", name, tensor.dtype, "x".join(map(str, tensor.shape)) or "-",
                           "" if tensor.batch is None else f"batch {tensor.batch}", "" if tensor.gradient else "constant"))
    for name, segment in dag.segments.items():
        lines.append(_join("segment", name, _pairs(segment.tags), _list("in", segment.inputs), _list("out", segment.outputs),
                           _list("parameters", segment.parameters), "frozen" if segment.frozen else ""))
    for name, bucket in dag.buckets.items():
        lines.append(_join("bucket", name, str(bucket.nbytes), f"zero {bucket.zero}", f"part {bucket.part}/{bucket.parts}",
                           f"prefetch {bucket.prefetch}", "slotted" if bucket.slotted else "", _list("of", bucket.segments)))
    lines += [f"shard {name} {ways}" for name, ways in dag.sharded.items()]
    for name, node in dag.nodes.items():
        lines.append(print_node(node))
        lines += [_join("  <" if edge.kind == DATA else "  ~", edge.source, edge.tensor) for edge in dag.incoming[name]]
    return "\n".join(lines) + "\n"


def print_node(node: Node) -> str:
    """Its line. Name, tags, devices, peers, groups, stream."""
    groups = "|".join(_numbers(group) for group in node.groups)
    return _join("node", node.name, _pairs(node.tags), node.devices and f"on {_numbers(node.devices)}",
                 node.peers and f"to {_numbers(node.peers)}", groups and f"groups {groups}", node.stream and f"stream {node.stream}")


def _join(*words) -> str:
    return " ".join(word for word in words if word)


def _pairs(pairs: Mapping[str, int]) -> str:
    return "{" + ",".join(f"{name}={index}" for name, index in pairs.items()) + "}" if pairs else ""


def _list(word: str, names: tuple[str, ...]) -> str:
    return f"{word} {','.join(names)}" if names else ""


def _numbers(devices: tuple[int, ...]) -> str:
    return ",".join(map(str, devices))


def parse_dag(text: str) -> DAG:
    """The reverse of `print_dag`. Raises ConfigurationError that names the line and quotes what is wrong in it."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if first != HEADER:
        raise ConfigurationError(f"program text: line 1: must be {HEADER!r}")
    parts: dict[str, dict] = {"dim": {}, "tensor": {}, "segment": {}, "bucket": {}, "shard": {}, "node": {}}
    edges: list[Edge] = []
    current = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0] == "#" or line.strip() == HEADER:
            continue
        try:
            if words[0] in ("<", "~"):
                if current is None:
                    raise ValueError("an edge stands below its node")
                edges.append(Edge(words[1], current, DATA if words[0] == "<" else TEMPORAL, words[2] if len(words) > 2 else ""))
                continue
            if words[0] not in parts:
                raise ValueError(f"{words[0]!r}: must be one of {', '.join(parts)}, < or ~")
            if words[1] in parts[words[0]]:
                raise ValueError(f"{words[0]} {words[1]} stands above already")
            parts[words[0]][words[1]] = _PARSERS[words[0]](words[1], iter(words[2:]))
            current = words[1] if words[0] == "node" else None
        except (ValueError, IndexError, StopIteration, KeyError) as error:
            why = "it ends too early" if isinstance(error, (IndexError, StopIteration)) else str(error)
            raise ConfigurationError(f"program text: line {number}: {line.strip()!r}: {why}") from None
    for edge in edges:
        if edge.source not in parts["node"]:
            raise ConfigurationError(f"program text: {edge.destination}: comes after {edge.source}, which is no node; correct one of the names")
    return DAG(parts["node"], tuple(edges), parts["segment"], parts["tensor"], parts["dim"], parts["bucket"], parts["shard"])


def parse_node_name(name: str) -> tuple[str, str, str, dict[str, int]]:
    """`SEND:F:layer0.h>1[MB=3]` -> kind, what, phase, dims."""
    match = _NODE.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no node: write KIND:what[DIM=index], like F:layer0[MB=3]")
    head, what, dims = match.groups()
    kind, _, phase = head.partition(":")
    if kind in PASSES and not phase:
        kind, phase = COMPUTE, kind
    if kind not in KINDS or phase not in ("", *PASSES):
        raise ValueError(f"{head!r} is no kind of node: it must be F, B, I, W or one of {', '.join(KINDS)}")
    return kind, what, phase, _parse_pairs(f"{{{dims}}}") if dims else {}


def _node(name: str, words: Iterator[str]) -> Node:
    kind, what, phase, dims = parse_node_name(name)
    fields: dict = {}
    for word in words:
        if word[0] == "{":
            fields["tags"] = _parse_pairs(word)
        elif word in ("on", "to"):
            fields["devices" if word == "on" else "peers"] = _parse_numbers(next(words))
        elif word == "groups":
            fields["groups"] = tuple(map(_parse_numbers, next(words).split("|")))
        elif word == "stream":
            fields["stream"] = next(words)
        else:
            raise ValueError(f"{word!r}: must be tags, on, to, groups or stream")
    return Node(kind, what, phase, dims=dims, **fields)


def _tensor(name: str, words: Iterator[str]) -> Tensor:
    dtype, shape = next(words), next(words)
    if not _SHAPE.fullmatch(shape):
        raise ValueError(f"{shape!r} is no shape: write 8x64, or - for a scalar")
    fields: dict = {"batch": None}
    for word in words:
        if word not in ("batch", "constant"):
            raise ValueError(f"{word!r}: must be batch or constant")
        fields |= {"batch": int(next(words))} if word == "batch" else {"gradient": False}
    return Tensor(() if shape == "-" else tuple(map(int, shape.split("x"))), dtype, **fields)


def _segment(name: str, words: Iterator[str]) -> Segment:
    fields: dict = {}
    for word in words:
        if word[0] == "{":
            fields["tags"] = _parse_pairs(word)
        elif word == "frozen":
            fields["frozen"] = True
        else:
            fields[{"in": "inputs", "out": "outputs", "parameters": "parameters"}[word]] = tuple(next(words).split(","))
    return Segment(name, **fields)


def _bucket(name: str, words: Iterator[str]) -> Bucket:
    fields: dict = {"nbytes": int(next(words))}
    for word in words:
        if word == "slotted":
            fields[word] = True
        elif word == "part":
            fields["part"], fields["parts"] = map(int, next(words).split("/"))
        elif word == "of":
            fields["segments"] = tuple(next(words).split(","))
        else:
            fields[{"zero": "zero", "prefetch": "prefetch"}[word]] = int(next(words))
    return Bucket(**fields)


def _number(name: str, words: Iterator[str]) -> int:
    return int(next(words))


_PARSERS = {"dim": _number, "tensor": _tensor, "segment": _segment, "bucket": _bucket, "shard": _number, "node": _node}


def _parse_pairs(text: str) -> dict[str, int]:
    if not re.fullmatch(r"\{\w+=\d+(,\w+=\d+)*\}", text):
        raise ValueError(f"{text!r}: write tags as {{PP=0,MB=1}}, without spaces")
    return {name: int(index) for name, index in (pair.split("=") for pair in text[1:-1].split(","))}


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
