"""Which systems are explored: every combination that the product accepts, each distinct behaviour once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product

from components import Rank
from explorer import Automaton, System
from links import Link

from rrfp.action import Edge
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import BUILT_IN, SPLIT_ONLY, Policy
from rrfp.scheduler import Scheduler
from rrfp.scheduler.hints import Announced, Prefer

ANY = "any"
"""A hint of the tests: every admissible action may be chosen."""
LIMITS = ("1f1b", "eager", "2p-1", "2p", "1", "2", "3", "2-1", "3-1", "paper:1", "paper:2")


@dataclass(frozen=True)
class Cell:
    """One system: a policy (hint "any" aside), a shape, and the transport's settings."""

    shape: tuple[int, int, int, int]
    """P, M, chunks, domain."""
    hint: str
    mode: str = "ready"
    limit: str = "1f1b"
    order: str = "microbatch"
    split: bool = False
    max_pending_w: int | None = None
    placement: str = "looped"
    forward_only: bool = False
    calls: int = 1
    credits: int = 4
    lanes: int = 1
    any_choice: bool = False
    """Every action that this policy's order and limits admit may be chosen, whatever its hint says. So for the hint `any`."""

    def __post_init__(self):
        if self.hint == ANY:
            object.__setattr__(self, "any_choice", True)

    def __str__(self) -> str:
        hint = f"any({self.hint})" if self.any_choice and self.hint != ANY else self.hint
        words = ["x".join(map(str, self.shape)), self.mode, hint, self.limit, self.order, f"credits={self.credits}",
                 f"lanes={self.lanes}"]
        words += ["split"] if self.split else []
        words += [f"w<={self.max_pending_w}"] if self.max_pending_w else []
        words += [self.placement] if self.placement != "looped" else []
        words += ["forwards"] if self.forward_only else []
        words += [f"calls={self.calls}"] if self.calls > 1 else []
        return " ".join(words)

    @property
    def policy(self) -> Policy:
        """Raises ConfigurationError where the product refuses the combination."""
        hint = ("bfw" if self.split else "bf") if self.hint == ANY else self.hint
        return Policy(hint=hint, mode=self.mode, limit=self.limit, order=self.order, lanes=self.lanes, split=self.split,
                      max_pending_w=self.max_pending_w)

    @property
    def stages(self) -> Placement:
        ranks, _, chunks, _ = self.shape
        return Placement.v(ranks, chunks) if self.placement == "v" else Placement.looped(ranks, chunks)

    @property
    def roomy(self) -> bool:
        """Whether no message ever waits for a credit."""
        return self.credits >= self.shape[1] * self.calls

    @property
    def by_itself(self) -> bool:
        """Whether "any admissible choice" does not cover it: it obeys a list, or may wait without a timer."""
        return self.mode == "strict" or any(
            type(s.hint) is Announced and s.hint._skips is not None for calls in self.schedulers() for s in calls[0])

    def schedulers(self) -> list[list[list[Scheduler]]]:
        """By rank, call and member."""
        _, microbatches, _, members = self.shape
        policy, placement = self.policy, self.stages
        made = [[[policy.scheduler(placement, rank, microbatches, forward_only=self.forward_only) for _ in range(members)]
                 for _ in range(self.calls)] for rank in range(placement.ranks)]
        if self.any_choice:
            for scheduler in (s for calls in made for each in calls for s in each):
                scheduler.hint = Prefer("BF")  # it is not asked, and has no state
        return made

    def system(self) -> System:
        schedulers = self.schedulers()
        known = self.behaviour(schedulers)
        if known not in _ranks:
            _ranks.clear()  # cells that share ranks follow each other
            _ranks[known] = [Automaton(Rank(calls, lanes=self.lanes, announces=calls[0][0].announces,
                                            any_choice=self.any_choice, roomy=self.roomy)) for calls in schedulers]
        ranks = _ranks[known]
        limits = self.policy.limits(self.stages, self.shape[1])
        return connect(ranks, [calls[0] for calls in schedulers], limits, credits=self.credits, lanes=self.lanes)

    @property
    def paper(self) -> bool:
        """Whether microbatches are finished one by one at the limit: what a rank may do then depends on all that it has done."""
        return self.limit.startswith("paper:") and self.shape[2] > 1 and self.mode == "ready"

    def alone(self) -> list[tuple[tuple, Rank]]:
        """Its ranks, each by itself (one member, one call), and what two ranks that behave alike have in common."""
        members = [calls[0][0] for calls in self.schedulers()]
        announces = members[0].announces
        return [((self.shape[:3], self.placement, self.split, rank, announces, self.any_choice, _traits(scheduler)),
                 Rank([[scheduler]], announces=announces, any_choice=self.any_choice)) for rank, scheduler in enumerate(members)]

    def behaviour(self, schedulers: Sequence | None = None) -> tuple:
        """Equal for two cells whose ranks behave alike."""
        lanes = self.lanes if self.shape[3] > 1 else 1
        roomy = self.roomy and self.order == "free"  # looked at in free order only
        return (self.shape, self.placement, self.split, self.forward_only, self.calls, self.any_choice, lanes, roomy,
                *(_traits(calls[0][0]) for calls in schedulers or self.schedulers()))


def _traits(scheduler: Scheduler) -> tuple:
    """What a scheduler's choices depend on, its tasks aside."""
    hint = scheduler.hint
    rows = tuple((name, value) for name, value in vars(hint).items() if isinstance(value, (int, str, float, tuple, type(None))))
    return (scheduler.limit, scheduler.admission, scheduler.order, scheduler.max_pending_w, scheduler._forwards, type(hint).__name__, rows)


_ranks: dict[tuple, list[Automaton]] = {}


@cache
def _link(edges: tuple[Edge, ...], credits: int, lanes: int, limit: int) -> Automaton:
    """The states of a link depend on nothing else, so all systems share it."""
    return Automaton(Link(edges, credits=credits, lanes=lanes, limit=limit))


def forget() -> None:
    """Unfold everything anew: the objects' own code has been changed."""
    _link.cache_clear()
    _ranks.clear()


def connect(
    ranks: Sequence[Automaton], schedulers: Sequence[Sequence[Scheduler]], limits: Sequence[int], *, credits: int, lanes: int,
    share: bool = False) -> System:
    """A link per edge and member. `share`: one per pair of ranks and direction (a control)."""
    receivers, senders = {}, {}
    for index, members in enumerate(schedulers):
        for task in members[0]._tasks.values():
            receivers |= dict.fromkeys(task.arrivals, index)
            senders |= dict.fromkeys(task.sends, index)
    groups: dict[tuple, list] = {}
    for edge in sorted(receivers):
        groups.setdefault((senders[edge], receivers[edge]) if share else edge, []).append(edge)
    links, channels = {}, []
    for member in range(len(schedulers[0])):
        for edges in groups.values():
            links |= {(member, edge): len(channels) for edge in edges}
            limit = len(edges) * max(1, limits[receivers[edges[0]]])
            channels.append(_link(tuple(edges), credits, lanes, limit))
    return System(ranks, links, channels, receivers)


def policies(shape: tuple[int, int, int, int], hints: Sequence[str] = (ANY, *BUILT_IN), part: int = 1) -> Iterator[Cell]:
    """Every combination of hint, mode, limit, order, split and bound of W that the product accepts for a shape; or every n-th."""
    combinations = product(
        ("looped", "v") if shape[2] > 1 else ("looped",), ((False, None), (True, None), (True, 1)), hints, ("ready", "strict"),
        ("microbatch", "free", "megatron"), LIMITS)
    for placement, (split, most), hint, mode, order, limit in islice(combinations, 0, None, part):
        if (hint in SPLIT_ONLY and not split) or (hint == ANY and mode == "strict"):
            continue
        cell = Cell(shape, hint, mode=mode, limit=limit, order=order, split=split, max_pending_w=most, placement=placement)
        try:
            cell.schedulers()
        except ConfigurationError:
            continue
        yield cell


def distinct(cells: Iterator[Cell]) -> list[Cell]:
    """The first of each group that behaves alike."""
    return list({cell.behaviour(): cell for cell in reversed(list(cells))}.values())[::-1]


def with_transports(cells: Sequence[Cell], transports: Sequence[tuple[int, int]]) -> list[Cell]:
    """Each cell under each (credits, lanes)."""
    return [replace(cell, credits=credits, lanes=lanes) for cell in cells for credits, lanes in transports]


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """What has to be explored so that every cell is proven: each by itself, or as part of any admissible choice in its setting."""
    return distinct(iter([cell if cell.by_itself else replace(cell, any_choice=True) for cell in cells]))
