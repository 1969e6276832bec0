"""What a random run may be: a case, written as JSON, and the strategy that draws one, the simplest first."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import product
from random import Random

from hypothesis import strategies as st

from rrfp.placement import Placement
from rrfp.policy import RULES
from rrfp.scheduler.lists import LISTS

ANY, LIST, FILE = "any", "a random list", "a random file"
"""Hints of the tests: any admissible action, at random; a random legal order, registered; the same as a CSV file."""
LIMITS = ("1f1b", "eager", "2p-1", "2p", "1", "2", "3", "5", "2-1", "4-2", "paper:1", "paper:3")
MOST_STAGES = 12


@dataclass(frozen=True)
class Case:
    """One run. A field left out is the simplest.

    placement: "looped", "v", or "random" owners of ranks x chunks stages.
    calls: (microbatches, forward only) per call.
    hint: a built-in's name, or `ANY`, `LIST`, `FILE`.
    durations: "equal", "zero", or "random", which is heavy-tailed. delays: "none" or "random", of every message.
    stalls: who blocks now and then: "none", "sends" (a free slot is refused for a while), "ranks" (a rank looks at nothing
        while an action runs, and for a while after it).
    late: seconds that announcements, credits, and news within a domain take.
    seed: of whatever is random above.
    """

    ranks: int = 1
    chunks: int = 1
    placement: str = "looped"
    calls: tuple[tuple[int, bool], ...] = ((1, False),)
    first_trainable: int = 0
    hint: str = "bf"
    mode: str = "ready"
    limit: str = "1f1b"
    order: str = "microbatch"
    split: bool = False
    max_pending_w: int | None = None
    members: int = 1
    ahead: bool = False
    credits: int = 1
    lanes: int = 1
    capacity: int = 1
    durations: str = "equal"
    delays: str = "none"
    stalls: str = "none"
    late: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        return json.dumps({f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default})

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The reverse of `str`."""
        given = json.loads(text)
        if "calls" in given:
            given["calls"] = tuple((microbatches, forward_only) for microbatches, forward_only in given["calls"])
        return cls(**given)

    @cached_property
    def stages(self) -> Placement:
        if self.placement == "looped":
            return Placement.looped(self.ranks, self.chunks)
        if self.placement == "v":
            return Placement.v(self.ranks, self.chunks)
        rng, more = Random(self.seed), self.ranks * (self.chunks - 1)
        owners = [*range(self.ranks), *(rng.randrange(self.ranks) for _ in range(more))]
        rng.shuffle(owners)
        return Placement.of(tuple(owners))

    @property
    def is_random(self) -> bool:
        """Whether the seed matters."""
        drawn = "random" in (self.placement, self.durations, self.delays)
        return drawn or self.stalls != "none" or self.hint in (ANY, LIST, FILE)

    def replace(self, **changes) -> "Case":
        return Case(**asdict(self) | changes)


def _choices(fixed: dict, **fields: Sequence) -> st.SearchStrategy[dict]:
    """All combinations of the fields' values, the simplest first; a value that stands there twice is drawn twice as often."""
    axes = [(fixed[name],) if name in fixed else values for name, values in fields.items()]
    return st.sampled_from([dict(zip(fields, values, strict=True)) for values in product(*axes)])


def cases(**fixed) -> st.SearchStrategy[Case]:
    """Cases, small ones most of the time. `fixed`: fields that are not drawn.

    Few draws of many fields each: most of the time of a small run would otherwise go into drawing it.
    """
    shapes = _choices(fixed, ranks=(1, 2, 2, 2, 3, 3, 4, 5, 6), chunks=(1, 1, 1, 2, 3), placement=("looped", "v", "random"),
                      first_trainable=(0,) * 14 + (1, 2))
    shapes = shapes.filter(lambda shape: shape["ranks"] * shape["chunks"] <= MOST_STAGES)
    hints = _choices(fixed, split=(False, True), hint=(ANY, ANY, *RULES, *LISTS, LIST, LIST, LIST, LIST, FILE),
                     max_pending_w=(None, None, 1, 2, 3))
    policies = _choices(fixed, mode=("ready", "ready", "ready", "strict"), limit=LIMITS,
                        order=("microbatch", "microbatch", "free", "free", "megatron"))
    transports = _choices(fixed, members=(1,) * 8 + (2, 2, 3), ahead=(False, True), capacity=(1, 1, 1, 2, 3), lanes=(1, 2, 3), credits=(1, 2, 3, 4))
    times = _choices(fixed, durations=("equal", "random", "random", "zero"), delays=("none", "random", "random"),
                     stalls=("none", "sends", "ranks"), late=(0.0, 0.3, 5.0))
    counts = st.sampled_from((1,) * 6 + (2, 3))
    sizes = {True: st.sampled_from(((1, False), (2, False), (2, False), (3, False), (3, True), (4, False), (6, False))),
             False: st.sampled_from(((1, False), (2, False), (2, False), (3, False), (2, True)))}
    seeds = st.integers(0, 2**20)

    @st.composite
    def draw_case(draw):
        shape, hint = draw(shapes), draw(hints)
        chosen = {**shape, **hint, **draw(policies), **draw(transports), **draw(times)}
        size = sizes[shape["ranks"] * shape["chunks"] <= 4]
        calls = tuple(draw(size) for _ in range(draw(counts)))
        if hint["hint"] == FILE:  # a file is for one number of microbatches
            calls = tuple((calls[0][0], forward_only) for _, forward_only in calls)
        return simplest(Case(**{**chosen, "calls": calls, "seed": draw(seeds), **fixed}))

    return draw_case()


def simplest(case: Case) -> Case:
    """The same run with every field that means nothing in it left out."""
    changes = {}
    if case.chunks == 1:
        changes["placement"] = "looped"
    if not case.split:
        changes["max_pending_w"] = None
    if case.hint == ANY:
        changes["mode"] = "ready"
    if case.members == 1:
        changes["ahead"] = False
    if case.first_trainable >= case.ranks * case.chunks:
        changes["first_trainable"] = 0
    return case.replace(**changes) if any(getattr(case, name) != value for name, value in changes.items()) else case


_SIMPLE_HINTS = ("bf", "1f1b", ANY)
_BESIDE = ({}, *({"limit": limit} for limit in ("1f1b", "1", "2", "3")),
           {"hint": ANY}, {"late": 5.0}, {"delays": "random"}, {"capacity": 2})
"""What a smaller pipeline may need to fail like a larger one: what a limit's name means, for one, depends on the size."""


def smaller(case: Case) -> Iterator[Case]:
    """Cases of a smaller pipeline, whatever else that takes, and of the same one with one field that is simpler."""
    for change in _less_work(case):
        yield from (case.replace(**{**beside, **change}) for beside in _BESIDE)
    for index, (count, forward_only) in enumerate(case.calls):
        if forward_only:
            yield case.replace(calls=(*case.calls[:index], (count, False), *case.calls[index + 1:]))
    for name in ("members", "lanes", "credits", "capacity"):
        yield from (case.replace(**{name: value}) for value in range(1, getattr(case, name)))
    for field in fields(Case):
        if field.name not in ("calls", "hint", "seed") and getattr(case, field.name) != field.default:
            yield case.replace(**{field.name: field.default})
    place = _SIMPLE_HINTS.index(case.hint) if case.hint in _SIMPLE_HINTS else None
    yield from (case.replace(hint=hint) for hint in _SIMPLE_HINTS[:place])


def _less_work(case: Case) -> Iterator[dict]:
    """Changes to one call, rank, chunk or microbatch fewer, or several."""
    for index, (count, forward_only) in enumerate(case.calls):
        before, after = case.calls[:index], case.calls[index + 1:]
        if before or after:
            yield {"calls": before + after}
        yield from ({"calls": (*before, (fewer, forward_only), *after)} for fewer in range(1, count))
    for name in ("ranks", "chunks"):
        yield from ({name: value} for value in range(1, getattr(case, name)))
