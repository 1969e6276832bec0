"""Every kind of agreement, in real processes and scripted, keeps what any must: one sequence, of messages that all have."""

import os
import random

import pytest
from members import Members, Player, calls_of, play

from rrfp.comm.clock import VirtualClock
from rrfp.comm.transport import Failure
from rrfp.errors import PipelineError
from rrfp.tp_coord.opening import COLLECTIVE
from rrfp.tp_coord.scripted_agreement import ScriptedDomain

KINDS = ["shared-memory", "messages", "messages across hosts", "broadcast", "all-gather"]


@pytest.fixture(scope="module", params=[(kind, count) for kind in KINDS for count in (2, 4)],
                ids=lambda layout: f"{layout[0]}, {layout[1]} members")
def group(request, tmp_path_factory):
    """Started once per layout; every case runs inside it."""
    kind, count = request.param
    hosts = [f"host{index}" for index in range(count)] if "hosts" in kind else None
    kind = kind.split()[0]
    with Members(kind, range(3, 3 + 2 * count, 2), tmp_path_factory.mktemp("store"), hosts=hosts) as group:
        group.kind = kind
        yield group
    assert group.left_behind == [[]] * count and group.remains() == []


def check(rows, calls, counted=True):
    """rows: log, received, common of each member; the first leads. counted: the leader sees the intersection."""
    log = rows[0][0]
    assert [(call, action) for call, action in log] == sorted(log, key=lambda entry: entry[0])
    assert len(log) == sum(len(lane) for lanes in calls for lane in lanes)
    for index, (other, received, common) in enumerate(rows):
        assert other == log, f"member {index} ran another sequence"
        assert received.keys() == common.keys()
    for message, when in rows[0][2].items() if counted else ():
        late = [index for index, row in enumerate(rows) if row[1][message] > when]
        assert not late, f"{message} came out as common before members {late} had it"


def test_one_sequence_of_what_every_member_has(group, seed, full):
    for case in range((6, 2)[not full] if group.kind in COLLECTIVE else (20, 4)[not full]):
        pause = random.Random(seed + case).choice([0.0, 0.0005, 0.003])
        rows = group.ask(play, seed + case, 30 if full else 12, pause)
        assert not any(isinstance(row, Exception) for row in rows), rows
        check(rows, calls_of(seed + case, 30 if full else 12), counted=group.kind not in COLLECTIVE)


@pytest.mark.parametrize("count", [2, 4])
def test_the_scripted_domain_does_the_same(count, seed):
    """The same players, under a virtual clock: what the tests above check is what the model check proves about."""
    rng = random.Random(seed)
    for case in range(10):
        clock = VirtualClock()
        domain = ScriptedDomain(count, clock=clock, delay=lambda member: rng.random())
        calls = calls_of(seed + case, 12)
        players = [Player(domain.agreement(index), index == 0, calls, random.Random(f"{seed} {index}"), now=clock.now)
                   for index in range(count)]
        while not all(player.done for player in players):
            active = [player for player in players if not player.done]
            rng.choice(active).step()
            clock.advance(rng.random() * 0.2)
        check([(player.log, player.received, player.common) for player in players], calls)


def test_state_names_the_leader_and_every_sign_of_life(group):
    for rank, state in zip(group.ranks, group.ask(state_of), strict=True):
        assert (state["leader"], state["members"]) == (group.ranks[0], list(group.ranks))
        assert rank not in state["peers"] and all(0 <= silence < 10 for silence in state["peers"].values())


def state_of(end):
    return end.agreement.state()


def test_a_forked_child_is_refused_and_hurts_nobody(group, seed):
    assert group.ask(fork) == [0] * len(group.ranks)
    rows = group.ask(play, seed, 3, 0.0)
    assert not any(isinstance(row, Exception) for row in rows), rows


def fork(end) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        end.agreement.abort(Failure(end.rank, "a child", "must not be heard"))
        end.agreement.close()
        assert end.agreement.state() == {}
        try:
            end.agreement.begin(end.call + 1)
        except PipelineError as error:
            code = 0 if "a forked child must not use it" in str(error) else 2
    finally:
        os._exit(code)
