"""Plans: what the engine gets of a program, in both modes, and that it needs to know nothing more."""

import random
import re
from pathlib import Path

import pytest

import rrfp.engine
from rrfp.action import Edge, parse_action
from rrfp.comm.transport import Arrival
from rrfp.errors import ConfigurationError
from rrfp.program.builders import BUILDERS, dualpipev
from rrfp.program.directives import Order, Place, Replicate, Shard, Split, apply
from rrfp.program.lower import is_tied, lower
from rrfp.program.traced import sketch
from rrfp.program.training import training_dag
from rrfp.simulate.clock import Deadlock, drive
from tests.program.models import chain, diamond

PARTS = ("attention", "experts", "combine")
UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def lowered(name, ranks, microbatches, *, parts=(), **options):
    stages = 2 * ranks if name in ("interleaved", "zb-v", "dualpipev") else ranks
    dag = training_dag(sketch(stages, parts=parts, batch=2 * microbatches))
    return lower(apply(dag, BUILDERS[name](ranks, microbatches, **options)))


def text(row):
    return " ".join("|".join(map(str, group)) for group in row)


def drawn(seed, spread):
    """Durations and delays of a seed: equal for every mode."""
    def duration(action):
        return UNIT.get(action.kind, 0.01) * random.Random(f"{seed} {action}").uniform(1 - spread, 1 + spread)

    def delay(edge, action):
        draw = random.Random(f"{seed} {edge} {action}")
        return draw.choice([0.0, 0.3, 0.6, 3.0]) * spread

    return duration, delay


# ---------------------------------------------------------------------- what a plan says
def test_a_plan_of_1f1b_with_replicas():
    program = lowered("1f1b", 2, 3, replicas=2)
    first, last = program.plans
    assert program.units == ("stage0", "stage1", "bucket0", "bucket1") and program.owners == (0, 1, 0, 1)
    assert text(first.row) == "0F0 0F1 0B0 0F2 0B1 0B2 2ALL_REDUCE 0UPDATE"
    assert (first.devices, last.devices, program.rank_of) == ((0, 1), (2, 3), {0: 0, 1: 0, 2: 1, 3: 1})
    task = last.dependencies.tasks[parse_action("1F2")]
    assert (task.arrivals, task.sends, task.in_flight) == ((Edge(0, 1),), (), 1)
    assert last.dependencies.tasks[parse_action("1B2")].sends == (Edge(1, 0),)
    assert first.dependencies.tasks[parse_action("2ALL_REDUCE")].after == tuple(map(parse_action, ("0B0", "0B1", "0B2")))
    message = first.messages[Edge(0, 1)]
    assert (message.kind, message.tensors, message.stream) == ("SEND", ("stage0.out",), "up")
    assert message.nodes[2] == ("SEND:F:stage0.stage0.out>2[MB=2]",)
    assert list(first.streams) == ["compute", "up", "down", "reduce"] and [plan.peak for plan in program.plans] == [2, 1]


def test_an_exchange_of_tokens_is_a_message_that_stays_on_its_rank():
    program = lowered("1f1b", 1, 2, parts=PARTS, replicas=2, experts=True)
    (plan,) = program.plans
    experts, combine = (plan.dependencies.tasks[parse_action(token)] for token in ("1F0", "2F0"))
    assert experts.arrivals == (Edge(0, 1),) and experts.after == ()
    assert combine.arrivals == (Edge(1, 2),) and combine.after == (parse_action("0F0"),), "the residual needs no message"
    assert plan.messages[Edge(0, 1)].kind == "ALL_TO_ALL"
    assert plan.dependencies.tasks[parse_action("1B0")].arrivals == (Edge(2, 1),)


def test_a_gather_belongs_to_the_action_that_reads_it():
    program = lowered("1f1b", 2, 2, parts=("a", "b"), replicas=2, zero=3)
    assert program.plans[0].gathers[parse_action("0F1")] != program.plans[0].gathers[parse_action("1F1")]
    assert {action.kind for action in program.plans[0].gathers} == {"F", "B"}
    # A segment's gradients of a microbatch are scattered right behind its backward, before the next segment's are made.
    assert re.match(r"2F0\|3F0 3B0\|\dREDUCE_SCATTER0\|2B0 \dREDUCE_SCATTER0 2F1", text(program.plans[1].row))


def test_a_split_backward_leaves_a_pending_weight_gradient():
    tasks = lowered("zb-1", 2, 2).plans[0].dependencies.tasks
    found = [(tasks[parse_action(token)].in_flight, tasks[parse_action(token)].backlog) for token in ("0F0", "0I0", "0W0")]
    assert found == [(1, 0), (0, 1), (-1, -1)]


def test_a_group_that_holds_both_halves_of_a_backward_keeps_their_order():
    """Each W follows its I though the halves run interleaved, past the all-to-alls between them."""
    def both(stage, kinds):
        return tuple({"PP": stage, "PASS": kind} for kind in kinds)

    dag = training_dag(sketch(1, parts=PARTS, batch=8))
    program = lower(apply(dag, [Place({}, (0, 1)), Shard({"EP": "*"}, (0, 1)), Replicate({"EP": "-"}, (0, 1)), Order((both(0, "F"), both(0, "IW")))]))
    assert text(program.plans[0].row[:2]) == "0F0|1F0|2F0 2I0|2W0|3ALL_REDUCE|1I0|1W0|0I0|0W0"


def test_pieces_of_a_part_are_units():
    dag = training_dag(sketch(3, batch=8))
    program = lower(apply(dag, [Split({}, "MB", 2), Split({"PP": 1}, "HALF", 2), *(Place({"PP": s}, (s,)) for s in range(3))]))
    assert program.units == ("stage0", "stage1[HALF=0]", "stage1[HALF=1]", "stage2", "stage1") and program.owners == (0, 1, 1, 2, 1)
    assert program.plans[2].dependencies.tasks[parse_action("3F1")].arrivals == (Edge(1, 3), Edge(2, 3))


def test_pieces_of_one_part_alone_are_no_microbatches():
    """Where nothing else is split, a message has no microbatch number that both ends know: the pieces are units, all of microbatch 0."""
    dag = training_dag(sketch(3, batch=8))
    program = lower(apply(dag, [Split({"PP": 1}, "HALF", 2), *(Place({"PP": s}, (s,)) for s in range(3))]))
    assert {action.microbatch for plan in program.plans for action in plan.nodes if action.kind in "FB"} == {0}
    assert [program.owners[unit] for unit in range(4)] == [0, 1, 1, 2]


# ---------------------------------------------------------------------- both modes run
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("options", [{}, {"parts": PARTS, "replicas": 2, "experts": True, "zero": 3}], ids=["plain", "experts-zero3"])
def test_both_modes_end_under_any_delays(name, options, full):
    """Strict runs its row; ready needs no more memory and, within a few percent, no more time."""
    program = lowered(name, 3, 6, **options)
    total = {"strict": 0.0, "ready": 0.0}
    for seed in range(12 if full else 3):
        for mode in total:
            schedulers = [program.scheduler(rank, mode=mode) for rank in range(3)]
            result = drive(schedulers, *drawn(seed, 0.5))
            total[mode] += result.makespan
            assert all(peak <= plan.peak for peak, plan in zip(result.peak_in_flight, program.plans, strict=True))
            if mode == "strict" and not options:
                flat = [[group for group in plan.row] for plan in program.plans]
                for ran, row in zip(result.rows, flat, strict=True):
                    at = 0
                    for group in row:
                        assert set(ran[at:at + len(group)]) == set(group)
                        at += len(group)
    assert total["ready"] < 1.03 * total["strict"], total


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sums_over_several_ranks_come_last(zero):
    """After all computation of a rank, and before its updates, which come one by one: nobody waits in an update for one who waits for it."""
    program = lower(apply(training_dag(chain(3, 8, tied=True).traced), BUILDERS["1f1b"](3, 4, replicas=2, zero=zero)))
    for mode in ("strict", "ready"):
        ran = drive([program.scheduler(rank, mode=mode) for rank in range(3)], *drawn(0, 0.5)).rows
        for plan, actions in zip(program.plans, ran, strict=True):
            nodes = [plan.nodes[action] for action in actions]
            kinds = "".join("c" if node.kind == "COMPUTE" else "t" if is_tied(node) else "u" if node.kind == "UPDATE" else "" for node in nodes)
            assert re.fullmatch("c+t{0,1}u+", kinds) and ("t" in kinds) == (plan.rank != 1), kinds


def test_with_more_memory_readiness_gains():
    program = lowered("1f1b", 4, 16)
    times = {}
    for limit in (None, 12):
        runs = ([program.scheduler(rank, mode="ready", limit=limit) for rank in range(4)] for _ in range(3))
        times[limit] = sum(drive(schedulers, *drawn(seed, 0.9)).makespan for seed, schedulers in enumerate(runs))
    assert times[12] < 0.95 * times[None], times


def test_what_a_program_cannot_be_asked_is_refused():
    program = lowered("1f1b", 2, 4)
    with pytest.raises(ConfigurationError, match="mode fast: must be one of strict, ready"):
        program.scheduler(0, mode="fast")
    with pytest.raises(ConfigurationError, match="limit 1: the program's own order holds 2 activations on rank 0; use at least that"):
        program.scheduler(0, mode="ready", limit=1)


def test_an_order_that_is_no_microbatch_order_runs_free():
    """Negative control: taken for microbatch order, the same row never ends."""
    rows = [tuple(({"PP": rank, "MB": m, "PASS": kind},) for kind, order in (("F", (0, 1, 2)), ("B", (2, 0, 1))) for m in order) for rank in (0, 1)]
    dag = training_dag(sketch(2, batch=6))
    program = lower(apply(dag, [Split({}, "MB", 3), Place({"PP": 0}, (0,)), Place({"PP": 1}, (1,)), *map(Order, rows)]))
    assert program.order == "free"
    result = drive([program.scheduler(rank) for rank in range(2)], *drawn(0, 0.5))
    assert [text([(a,) for a in row if a.kind == "B"]) for row in result.rows] == ["0B2 0B0 0B1", "1B2 1B0 1B1"]
    object.__setattr__(program, "order", "microbatch")
    with pytest.raises(Deadlock):
        drive([program.scheduler(rank) for rank in range(2)], *drawn(0, 0.5))


# ---------------------------------------------------------------------- the engine itself
class Local:
    """A transport that also carries edges which stay on their rank: what an all-to-all does, without the collective."""

    def __init__(self, transport, late):
        self._transport, self._late, self._local, self.cluster = transport, late, set(), None

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def open(self, post, *, deadline):
        self._post = post
        self._transport.open(post, deadline=deadline)

    def begin(self, call, facts=None):
        self._call = call
        self._transport.begin(call, facts)

    def stays(self, edge):
        return self.cluster.owner[edge.source] == self.cluster.owner[edge.destination]

    def send(self, edge, microbatch, payload, *, tell=False):
        if not self.stays(edge):
            return self._transport.send(edge, microbatch, payload, tell=tell)
        clock = self.cluster.clock
        clock.call_at(clock.now() + self._late, lambda: self._post(Arrival(self._call, edge, 0, microbatch, payload, clock.now())))

    def announce(self, edge, microbatch, duration):
        if not self.stays(edge):
            self._transport.announce(edge, microbatch, duration)

    def consumed(self, arrival):
        if not self.stays(arrival.edge):
            self._transport.consumed(arrival)

    def release(self, arrival):
        if not self.stays(arrival.edge):
            self._transport.release(arrival)


@pytest.mark.parametrize("mode", ["strict", "ready"])
@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_the_engine_runs_programs_as_it_is(virtual, name, mode, seed):
    """Real engines and schedulers: every action once, on its inputs, lanes in order, limits kept, credits all back."""
    program = lowered(name, 2, 4, parts=PARTS, replicas=2, experts=True)
    ends = []

    def local(transport):
        ends.append(Local(transport, 0.7))
        return ends[-1]

    owner = {unit: rank for unit, rank in enumerate(program.owners)}
    crossing = [edge for plan in program.plans for edge in plan.messages if owner[edge.source] != owner[edge.destination]]
    duration, delay = drawn(seed, 0.5)
    cluster = virtual.Cluster(owner, crossing, duration=lambda action, _: duration(action), transport=local,
                              delay=lambda edge, m, _: delay(edge, m))
    for end in ends:
        end.cluster = cluster
    call = virtual.Call(lambda rank: program.scheduler(rank, mode=mode), announce=mode == "ready")
    cluster.run(call, call).check()


def test_a_strategy_that_nobody_shipped_runs(virtual, seed):
    """Two encoders of unlike depth that join, backwards in another order, one split: the same engine, both modes."""
    def entries(tag, kinds, order):
        return tuple(({tag: "*", "MB": m, "PASS": kind},) for m in order for kind in kinds)

    model = diamond(8)
    back = (2, 0, 3, 1)
    dag = apply(training_dag(model.traced), [
        Split({}, "MB", 4), Place({"VIT": "*"}, (0,)), Place({"TEXT": "*"}, (1,)), Place({"LLM": "*"}, (2,)),
        Order(entries("VIT", "F", range(4)) + entries("VIT", "B", back)), Order(entries("TEXT", "F", range(4)) + entries("TEXT", "IW", back)),
        Order(entries("LLM", "F", range(4)) + entries("LLM", "B", back)),
    ])  # fmt: skip
    program = lower(dag)
    for mode in ("strict", "ready"):
        duration, delay = drawn(seed, 0.5)
        pipeline = [plan.dependencies for plan in program.plans]
        cluster = virtual.Cluster.of_dependencies(pipeline, duration=lambda a, _: duration(a), delay=lambda edge, m, _: delay(edge, m))
        cluster.run(virtual.Call(lambda rank: program.scheduler(rank, mode=mode), announce=mode == "ready")).check()


def test_nothing_below_knows_a_strategy_by_name():
    """Engine, communication, agreement and the scheduler's core: no line names a strategy that ships here."""
    root = Path(rrfp.engine.__file__).parents[1]
    files = [file for room in ("engine", "comm", "tp_coord") for file in root.glob(f"{room}/*.py")]
    files += [root / "scheduler/arbiter.py", root / "scheduler/dependencies.py"]
    names = re.compile("dualpipe|gpipe|zb[-_]?[v1h]|zerobubble|rrfp.program|builders", re.IGNORECASE)
    assert len(files) > 20 and [f"{file.name}: {line}" for file in files for line in file.read_text().splitlines() if names.search(line)] == []


def test_the_digest_tells_programs_apart():
    one, two, three = lowered("1f1b", 2, 4), lowered("1f1b", 2, 4), lowered("gpipe", 2, 4)
    assert one.digest == two.digest != three.digest


def test_shard_and_replicate_in_the_issue_order_of_all_devices():
    """Collectives of a stream stand in one order on every device that takes part, whichever plan is read."""
    dag = training_dag(sketch(4, parts=PARTS, batch=24))
    program = lower(apply(dag, dualpipev(2, 6, replicas=2, experts=True)))
    position = {}
    for plan in program.plans:
        for names in plan.streams.values():
            for index, name in enumerate(names):
                position.setdefault(name, []).append(index)
    assert set(position) == set(program.dag.nodes)

