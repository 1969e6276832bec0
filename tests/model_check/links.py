"""An edge as a state machine over the real objects: the sender's end and its rule, what is on its way, the receiver's end."""

import copy
from collections import deque

from components import Violation, require

from rrfp.action import Edge
from rrfp.comm.inbound import Inlet
from rrfp.comm.message import decode
from rrfp.comm.outbound import Job, Outlet, Sender
from rrfp.comm.transport import Arrival


class Wire:
    """A lane's socket: keeps the frames."""

    def __init__(self):
        self.frames: deque = deque()

    def send_multipart(self, frames) -> None:
        self.frames.append(frames)


def _never(*arguments):
    raise Violation(f"the sender failed: {arguments}")


_SENDER = Sender([], delay=None, need=_never, fail=_never, name="model")  # only its rule is used; its thread never starts


class Link:
    """One edge: the real sender's end and its rule, the frames on their way, the real receiver's end.

    Args:
        edges: the edge. Several (a control) share one channel: one set of credits and lanes.
        credits, lanes: as of `ZmqTransport`.
        limit: of the rank that receives, which bounds the buffers that it keeps.
    """

    def __init__(self, edges: tuple[Edge, ...], *, credits: int, lanes: int, limit: int):
        self.edges, self.credits, self.limit = edges, credits, limit
        self.outlet = Outlet(edges[0], 1, [Wire() for _ in range(lanes)], None, most_credits=credits)
        self.inlet = Inlet(edges[0], 0, lanes=lanes, credits=credits, slot_bytes=0, limit=1, shared=False)
        self.back: deque = deque()
        self.held: dict[tuple, Arrival] = {}
        self.news: deque = deque()
        for _ in range(credits):
            self.outlet.credits.append(self.inlet.grant().grant())

    def fork(self) -> "Link":
        return copy.deepcopy(self)

    def key(self) -> tuple:
        """Slots are alike: only how many of them are where counts."""
        return (
            tuple((job.call, job.microbatch) for job in self.outlet.waiting), len(self.outlet.credits), len(self.back),
            tuple(tuple(_message(frames) for frames in wire.frames) for wire in self.outlet.sockets),
            frozenset((key, arrival.slot.consumed) for key, arrival in self.held.items()), tuple(self.news))

    def check(self) -> None:
        granted = set(self.inlet.granted)
        free, returning = [g.slot for g in self.outlet.credits], [g.slot for g in self.back]
        flying = [decode(frames[0])[0].slot for wire in self.outlet.sockets for frames in wire.frames]
        unused = [a for a in self.held.values() if not a.slot.consumed]
        total = len(free) + len(flying) + len(returning) + len(unused)
        edge = self.edges[0]
        require(total == self.credits, f"edge {edge} has {total} of {self.credits} credits")
        require(sorted(free + flying + returning) == sorted(granted), f"edge {edge}: the slots granted are not those under way")
        kept = len(self.held) - len(unused)
        require(kept <= self.limit, f"edge {edge} keeps {kept} buffers, its rank may hold {self.limit} activations")
        used = len(granted) + len(self.held)
        require(self.inlet.pool.count <= self.credits + self.limit and used <= self.inlet.pool.count, f"edge {edge}: buffers leak")

    @property
    def finished(self) -> bool:
        return not (self.outlet.waiting or self.held or any(wire.frames for wire in self.outlet.sockets))

    def events(self) -> list[tuple]:
        found = [("leave",)] if self.outlet.waiting and self.outlet.credits else []
        found += [("credit",)] if self.back else []
        found += [("arrive", lane) for lane, wire in enumerate(self.outlet.sockets) if wire.frames]
        return found + ([("news", self.news[0][-1])] if self.news else [])

    def level(self, event: tuple) -> int:
        """From which level of the reduction on the event goes first alone; 0: never."""
        return int(event[0] in ("leave", "credit") or event == ("news", True))

    def apply(self, event: tuple) -> tuple[str, list[tuple]] | None:
        return getattr(self, "_" + event[0])(*event[1:])

    def _number(self, edge: Edge, microbatch: int) -> int:
        return microbatch * len(self.edges) + self.edges.index(edge)

    def _name(self, number: int) -> tuple[Edge, int]:
        return self.edges[number % len(self.edges)], number // len(self.edges)

    def _send(self, edge, call, microbatch):
        """Like `Sender.put` and the part of its thread that takes the job."""
        number, outlet = self._number(edge, microbatch), self.outlet
        outlet.queued += 1
        outlet.waiting.append(Job(call, number, microbatch % len(outlet.sockets), 0, ()))
        return "", []

    def _flushed(self, edge):
        return None if self.outlet.waiting else ("", [])

    def _leave(self):
        _SENDER._pump(self.outlet)
        return f"what waited for a credit of {self._names} leaves", []

    def _arrive(self, lane):
        header, body = decode(self.outlet.sockets[lane].frames.popleft()[0])
        edge, microbatch = self._name(header.microbatch)
        self.held[header.call, header.microbatch] = self.inlet.accept(header, body, [], lane, 0.0)
        about = header.call, edge, microbatch
        self.news = deque((*news[:3], news[3] or news[:3] == about) for news in self.news)
        return f"{edge} brings microbatch {microbatch}", [("arrive", header.call, edge, microbatch)]

    def _consume(self, edge, call, microbatch):
        arrival = self.held[call, self._number(edge, microbatch)]
        self.back.append(self.inlet.consume(arrival.slot).grant())
        return "", []

    def _release(self, edge, call, microbatch):
        self.inlet.release(self.held.pop((call, self._number(edge, microbatch))).slot)
        return "", []

    def _credit(self):
        self.outlet.credits.append(self.back.popleft())
        return f"a credit of {self._names} returns", []

    def _announce(self, edge, call, microbatch):
        self.news.append((call, edge, microbatch, False))
        return "", []

    def _news(self, late):
        """late: its message is here already, so nothing looks at it any more."""
        call, edge, microbatch, _ = self.news.popleft()
        return f"{edge} announces microbatch {microbatch}", [("announce", call, edge, microbatch)]

    @property
    def _names(self) -> str:
        return "/".join(map(str, self.edges))


def _message(frames) -> tuple[int, int]:
    header, _ = decode(frames[0])
    return header.call, header.microbatch
