"""A transport whose edges may stay on their rank: an all-to-all is a message from a rank to itself, which its replicas carry together.

Everything else goes to the transport below. Tokens that come back are an arrival, like any other; the engine sees no difference.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from rrfp.action import Edge
from rrfp.comm.transport import Arrival, Event, Payload, Transport
from rrfp.program.execute.streams import Streams

Exchange = Callable[[torch.Tensor], torch.Tensor]


class ExchangeTransport:
    """See `rrfp.comm.transport.Transport`. A payload of a local edge is a sequence of tensors, in an arrival too.

    Args:
        below: carries what crosses ranks.
        streams: where all-to-alls run.
        exchanges: by local edge and microbatch: for each tensor the name and stream of its all-to-all, and what does it.
        issued: told the stream of each that was issued.
    """

    def __init__(self, below: Transport, *, streams: Streams, exchanges: Mapping[tuple[Edge, int], Sequence[tuple[str, str, Exchange]]],
                 issued: Callable[[str], None]):
        self._below, self._streams, self._exchanges, self._issued = below, streams, exchanges, issued
        self._local = {edge for edge, _ in exchanges}
        self.flush, self.abort, self.close, self.state = below.flush, below.abort, below.close, below.state

    def open(self, post: Callable[[Event], None], *, deadline: float) -> None:
        self._post = post
        self._below.open(post, deadline=deadline)

    def begin(self, call: int, facts: Mapping[str, str] | None = None) -> None:
        self._call = call
        self._below.begin(call, facts)

    def send(self, edge: Edge, microbatch: int, payload: Payload, *, tell: bool = False) -> None:
        if edge not in self._local:
            self._below.send(edge, microbatch, payload, tell=tell)
            return
        call, came, operations = self._call, [None] * len(payload), []
        for index, ((name, stream, exchange), tensor) in enumerate(zip(self._exchanges[edge, microbatch], payload, strict=True)):
            def run(index=index, exchange=exchange, tensor=tensor):
                came[index] = exchange(tensor)

            def arrive():
                self._post(Arrival(call, edge, 0, microbatch, tuple(came), time.monotonic()))

            last = index == len(payload) - 1
            operations.append(self._streams.issue(stream, name, run, after=operations if last else (), then=arrive if last else None))
            self._issued(stream)

    def announce(self, edge: Edge, microbatch: int, duration: float) -> None:
        if edge not in self._local:
            self._below.announce(edge, microbatch, duration)

    def consumed(self, arrival: Arrival) -> None:
        if arrival.edge not in self._local:
            self._below.consumed(arrival)

    def release(self, arrival: Arrival) -> None:
        if arrival.edge not in self._local:
            self._below.release(arrival)


def exchange(tensor: torch.Tensor, *, inwards: bool, members: int, move: Callable[[torch.Tensor, torch.Tensor], None]) -> torch.Tensor:
    """Tokens to their experts (inwards), or back.

    Args:
        tensor: inwards experts x own tokens x ..., else own experts x tokens x ...
        members: devices that share the experts. move(output, input): `all_to_all_single` among them.

    Returns:
        Inwards own experts x tokens of all members x ..., in their order; else experts x own tokens x ...
    """
    experts, tokens, *rest = tensor.shape
    if inwards:
        sent = tensor.contiguous()
        received = sent.new_empty((members, experts // members, tokens, *rest))
        move(received.view(-1), sent.view(-1))
        return received.transpose(0, 1).reshape(experts // members, members * tokens, *rest)
    sent = tensor.view(experts, members, tokens // members, *rest).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    move(received.view(-1), sent.view(-1))
    return received.view(members * experts, tokens // members, *rest)
