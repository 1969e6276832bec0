"""Runs a case on real engines, schedulers, credits and agreement under a virtual clock, and checks all that it was promised."""

import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random

from cases import ANY, FILE, LIST, Case
from cluster import Call, Cluster, Member, VirtualExecutor

from rrfp.action import Action
from rrfp.comm.scripted_transport import ScriptedNetwork
from rrfp.engine.loop import Engine
from rrfp.hint_names import registered
from rrfp.policy import HintContext, Policy, register_hint
from rrfp.scheduler import Dependencies, Scheduler, chain, lists
from rrfp.scheduler.arbiter import WAIT, Decision
from rrfp.scheduler.hints import Announced, Hint, Row


# -- hints ---------------------------------------------------------------------------------------------------------------
class Any(Hint):
    """Whichever admissible action the dice name, the same one until it was launched."""

    def __init__(self, seed: str):
        self._rng = Random(seed)
        self._chosen: Action | None = None

    def choose(self, scheduler, now):
        admissible = scheduler.admissible()
        if self._chosen not in admissible:
            self._chosen = self._rng.choice(admissible) if admissible else None
        return WAIT if self._chosen is None else Decision(self._chosen)

    def launched(self, action):
        self._chosen = None


def random_rows(pipeline: Sequence[Dependencies], limits: Sequence[int], rng: Random, *, free: bool) -> list[Row]:
    """A random topological order of all actions, by rank; within the limits where it finds a way, with a tie now and then.

    free: microbatches of a (stage, kind) in any order (of forwards, microbatch 0 first).
    """
    rank_of = {action: d.rank for d in pipeline for action in d.tasks}
    tasks = {action: task for d in pipeline for action, task in d.tasks.items()}
    sender = {(edge, a.microbatch): a for a, task in tasks.items() for edge in task.sends}
    lacks = {a: {*task.after, *(sender[edge, a.microbatch] for edge in task.arrivals)} for a, task in tasks.items()}
    for action in tasks:
        before = 0 if free else action.microbatch - 1
        if action.microbatch and (action.kind == "F" or not free):
            lacks[action].add(Action(action.kind, action.stage, before))
    waiters: dict[Action, list[Action]] = {}
    for action, before in lacks.items():
        for one in before:
            waiters.setdefault(one, []).append(action)
    ready = sorted(action for action, before in lacks.items() if not before)
    held, rows = [0] * len(pipeline), [[] for _ in pipeline]
    while ready:
        fits = [a for a in ready if tasks[a].in_flight <= 0 or held[rank_of[a]] < limits[rank_of[a]]]
        action = rng.choice(fits or ready)
        ready.remove(action)
        rank = rank_of[action]
        held[rank] += tasks[action].in_flight
        if rows[rank] and rng.random() < 0.1:
            rows[rank][-1] = (*rows[rank][-1], action)
        else:
            rows[rank].append((action,))
        for waiter in waiters.get(action, ()):
            lacks[waiter].discard(action)
            if not lacks[waiter]:
                ready.append(waiter)
    return [tuple(row) for row in rows]


def rows_of(case: Case, microbatches: int, limits: Sequence[int]) -> list[Row]:
    placement = case.stages
    pipeline = [chain(placement, rank, microbatches, split=case.split) for rank in range(placement.ranks)]
    return random_rows(pipeline, limits, Random(f"{case.seed}/{microbatches}"), free=case.order == "free")


@contextmanager
def policy_of(case: Case) -> Iterator[Policy]:
    """The case's policy. Raises ConfigurationError where the product refuses it."""
    options = {"mode": case.mode, "limit": case.limit, "order": case.order, "lanes": case.lanes, "split": case.split,
               "max_pending_w": case.max_pending_w}
    if case.hint == LIST:
        memo = cache(lambda microbatches, limits: rows_of(case, microbatches, limits))

        def hint(context: HintContext) -> list[Row]:
            return memo(context.microbatches, context.limits)

        register_hint(LIST, hint)
        try:
            yield Policy(hint=LIST, **options)
        finally:
            del registered[LIST]
    elif case.hint == FILE:
        microbatches = case.calls[0][0]
        limits = Policy(hint="bf", **options).limits(case.stages, microbatches)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "order.csv"
            lists.write(rows_of(case, microbatches, limits), path)
            yield Policy(hint=str(path), **options)
    else:
        yield Policy(hint="bf" if case.hint == ANY else case.hint, **options)


# -- what blocks ---------------------------------------------------------------------------------------------------------
class Network(ScriptedNetwork):
    """Refuses a free slot for a while, as a busy peer does; counts credits at every move."""

    pause = staticmethod(lambda edge, microbatch: 0.0)

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._refused: dict = {}
        """Edge -> the message that was refused last, and whether it still is."""

    def pump(self, link) -> None:
        while link.waiting and link.credits:
            head = link.waiting[0]
            refused, still = self._refused.get(link.edge, (None, False))
            if still:
                return
            if head is not refused and (pause := self.pause(link.edge, head.microbatch)):
                self._refused[link.edge] = head, True
                self.clock.call_at(self.clock.now() + pause, lambda: self._resume(link))
                return
            rest = link.waiting
            rest.popleft()
            link.waiting = deque([head])
            super().pump(link)
            link.waiting = rest
        assert min(link.credits, link.outstanding) >= 0, f"credits of {link.edge}"
        assert link.credits + link.outstanding <= self.credits, f"credits of {link.edge}"

    def _resume(self, link) -> None:
        self._refused[link.edge] = self._refused[link.edge][0], False
        self.pump(link)


class Executor(VirtualExecutor):
    blocked_until = 0.0
    """Until then its rank looks at nothing."""


class WatchedEngine(Engine):
    """Nothing that may run is left idle: only a strict list and `announced` ever wait."""

    def _until(self, decision):
        scheduler = self.scheduler
        if decision.action is None and len(self._launched) < self._executor.capacity:
            waits = scheduler.hint.strict or type(scheduler.hint) is Announced
            assert waits or not scheduler.admissible(), f"idle, though {scheduler.admissible()[0]} may run"
        return super()._until(decision)


class RandomCluster(Cluster):
    """A cluster whose ranks sleep."""

    def _has_news(self, member: Member) -> bool:
        if member.running and self.clock.now() < member.executor.blocked_until:
            member.wake = member.executor.blocked_until
            return False
        return super()._has_news(member)


# -- one run -------------------------------------------------------------------------------------------------------------
def run(case: Case, *, engine=WatchedEngine, network=Network, transport=lambda transport: transport, agree=True) -> Cluster:
    """Run the case to its end and check it.

    Raises:
        ConfigurationError: the product refuses the combination.
        AssertionError, PipelineError, ValueError: a promise is broken. `cluster` of the exception is the cluster as it stands.
    """
    with policy_of(case) as policy:
        calls = [_call(case, policy, microbatches, forward_only) for microbatches, forward_only in case.calls]
        for call in calls:
            call.schedulers(0)
        cluster = _cluster(case, engine, network, transport, agree)
        try:
            cluster.run(*calls).check()
            _check(case, policy, cluster)
        except Exception as error:
            error.cluster = cluster
            raise
    return cluster


def _call(case: Case, policy: Policy, microbatches: int, forward_only: bool) -> Call:
    placement = case.stages

    def scheduler(rank: int) -> Scheduler:
        made = policy.scheduler(placement, rank, microbatches, forward_only=forward_only, first_trainable=case.first_trainable)
        if case.hint == ANY:
            made.hint = Any(f"{case.seed}/{rank}")
        return made

    return Call(scheduler, announce=policy.scheduler(placement, 0, microbatches).announces, forward_only=forward_only, microbatches=microbatches,
                limits=tuple(policy.limits(placement, microbatches)))


def _cluster(case: Case, engine, network, transport, agree) -> Cluster:
    rng, drawn = Random(case.seed), {}

    def some(*key) -> float:
        if key not in drawn:
            drawn[key] = rng.choice((0.0, 0.1, 1.0, rng.random(), 20 * rng.random(), 100.0))
        return drawn[key]

    def duration(action: Action, member: int) -> float:
        if case.durations == "random":
            return some(action, member)
        return 0.0 if case.durations == "zero" else 2.0 if action.kind == "B" else 1.0

    class Blocking(Executor):
        def launch(self, task, inputs, done):
            super().launch(task, inputs, done)
            if case.stalls == "ranks":
                self.blocked_until = self._clock.now() + self._duration(task.action) + some("rank", task.action)

    class Refusing(network):
        pause = staticmethod(lambda edge, microbatch: some("slot", edge, microbatch))

    def delay(edge, microbatch, member) -> float:
        return some("message", edge, microbatch, member) if case.delays == "random" else 0.0

    return RandomCluster.of(
        case.stages, members=case.members, agree=agree, credits=case.credits, lanes=case.lanes, capacity=case.capacity,
        decide_ahead=case.ahead,
        engine=engine, executor=Blocking, network=Refusing if case.stalls == "sends" else network, transport=transport,
        duration=duration, delay=delay, control_delay=case.late, news=lambda member: case.late * member)


def _check(case: Case, policy: Policy, cluster: Cluster) -> None:
    """What `Cluster.check` does not know: orders, lists, bounds of W and of buffers."""
    bound = {member.rank: max(case.capacity, *member.limits) + case.credits for member in cluster.members}
    for network in cluster.networks:
        for edge, link in network.links.items():
            if (receiver := cluster.owner.get(edge.destination)) in bound:
                assert len(link.free) <= bound[receiver], f"{len(link.free)} buffers of {edge}, at most {bound[receiver]}"
    for rank in range(case.ranks):
        member = cluster[rank]
        for (microbatches, _), scheduler, executor in zip(case.calls, member.schedulers, member.executors, strict=True):
            order = executor.order
            assert scheduler.in_flight == scheduler.pending_w == 0
            most = case.max_pending_w
            assert most is None or scheduler.peak_pending_w <= most, f"{scheduler.peak_pending_w} W pending, above {most}"
            for stage in scheduler.dependencies.stages:
                for kind in "FBIW":
                    ran = [a.microbatch for a in order if (a.stage, a.kind) == (stage, kind)]
                    if case.order != "free":
                        assert ran == sorted(ran), f"{stage}{kind} ran in the order {ran}"
                    assert kind != "F" or ran[0] == 0, f"{stage}F{ran[0]} ran first"
            if case.order == "megatron" and case.chunks > 1:
                wanted = lists.interleaved_forwards(scheduler.dependencies.stages, microbatches, case.ranks)
                assert [a for a in order if a.kind == "F"] == wanted, f"rank {rank}: forwards out of Megatron's order"
            if case.mode == "strict":
                _check_obeyed(policy.list_for(case.stages, microbatches)[rank], order)


def _check_obeyed(row: Row, order: list[Action]) -> None:
    """The order is the row's, of what this call runs; inside a tie any."""
    position = 0
    for group in row:
        group = [action for action in group if action in set(order)]
        ran = order[position:position + len(group)]
        assert sorted(ran) == sorted(group), f"{' '.join(map(str, ran))} ran where the list has {' '.join(map(str, group))}"
        position += len(group)


def story(case: Case, cluster: Cluster | None) -> str:
    """The case, every rank's order, and the line that repeats it."""
    lines = [f"case {case}"]
    for member in cluster.members if cluster else ():
        name = f"rank {member.rank}" + (f", member {member.member}" if case.members > 1 else "")
        calls = (" ".join(map(str, executor.order)) for executor in member.executors)
        lines.append(f"  {name}: {' | '.join(calls)}")
    lines.append(f"repeat with: python tests/random_schedules/replay.py '{case}'")
    return "\n".join(lines)
