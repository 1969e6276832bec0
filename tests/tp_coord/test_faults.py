"""What goes wrong in one member is told to all, in the same words, within the deadlines; and a divergence is an error, not a
hang."""

import os
import re
import signal
import threading
import time

import members
import pytest
from members import EDGES, Members, action_of, play

from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Failure
from rrfp.errors import ConfigurationError, PipelineError
from rrfp.tp_coord import opening
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.opening import COLLECTIVE, open_agreement

COUNTED = ["shared-memory", "messages"]
HEARTBEAT, SILENCE = 0.1, 0.6


@pytest.fixture(params=[*COUNTED, *COLLECTIVE])
def make(request, tmp_path):
    """make(count, **options): a group that a fault may end. Whatever happened, nothing of it is left."""
    yield from _make(request.param, tmp_path)


@pytest.fixture(params=COUNTED)
def counted(request, tmp_path):
    """The same, for the kinds in which the leader counts what has arrived."""
    yield from _make(request.param, tmp_path)


def _make(kind, tmp_path):
    made = []
    def make(count, **options):
        options = {"heartbeat_s": HEARTBEAT, "silence_s": SILENCE, **options}
        made.append(Members(kind, range(count), tmp_path / str(len(made)), **options))
        return made[-1]

    make.kind = kind
    yield make
    for group in made:
        left = group.end()
        assert all(row in ([], None) for row in left), left
        assert group.remains() == []


def fail_of(end):
    """Waits for a failure; how it is told, and when."""
    return end.until_failure(), time.monotonic()


def survivors(group, victim):
    return [index for index in range(len(group.ranks)) if index != victim]


@pytest.mark.parametrize("victim", [0, 1, 3], ids=["leader", "follower", "last"])
def test_a_killed_member_is_named_by_all_at_once(make, victim):
    group = make(4)
    group.ask(play, 1, 2, 0.0)
    pid = group.processes[victim].pid
    killed = time.monotonic()
    group.signal(victim, signal.SIGKILL)
    others = survivors(group, victim)
    rows = [row for row in group.ask(fail_of, only=others) if row is not None]
    assert {row[0] for row in rows} == {
        Failure(victim, "agreement", f"rank {victim} (process {pid}) ended without saying goodbye", lost=True)}
    assert max(row[1] for row in rows) - killed < 1.0


@pytest.mark.parametrize("victim", [0, 2], ids=["leader", "follower"])
def test_a_stopped_member_is_named_by_all_within_the_silence(make, victim, full):
    if make.kind in COLLECTIVE and not full and victim == (2 if make.kind == "broadcast" else 0):
        return  # the channel beside the collectives tells, as in the other kinds
    group = make(4)
    group.ask(play, 2, 2, 0.0)
    stopped = time.monotonic()
    group.signal(victim, signal.SIGSTOP)
    rows = [row for row in group.ask(fail_of, only=survivors(group, victim)) if row is not None]
    assert {row[0] for row in rows} == {
        Failure(victim, "agreement", f"no sign of life for {SILENCE:.0f} s: stopped, or its machine hangs", lost=True)}
    assert SILENCE - HEARTBEAT < min(row[1] for row in rows) - stopped
    assert max(row[1] for row in rows) - stopped < SILENCE + 1.0
    group.signal(victim, signal.SIGKILL)


@pytest.mark.parametrize("origin", [0, 2], ids=["leader", "follower"])
def test_what_a_member_raises_reaches_all_in_its_words(make, origin):
    group = make(4)
    failure = Failure(origin, "1F3", 'ValueError: "ünïcode" ' + "x" * 50, "Traceback (most recent call last): ...\n" * 200)
    assert group.ask(abort, failure, only=[origin])[origin] is None
    rows = group.ask(fail_of, only=survivors(group, origin))
    assert {row[0] for row in rows if row is not None} == {failure}
    # The first one wins: what follows from it is not told.
    group.ask(abort, Failure(1, "2F0", "later"))
    assert all(row is None for row in group.ask(no_failure))


def test_a_very_long_failure_is_cut_not_lost(make):
    group = make(2)
    group.ask(abort, Failure(1, "1F3", "\"" * 200_000, "\"" * 200_000 + "the end"), only=[1])
    failure = group.ask(fail_of, only=[0])[0][0]
    assert failure.where == "1F3" and failure.text and failure.traceback.endswith("the end")


def abort(end, failure):
    end.agreement.abort(failure)


def no_failure(end):
    """None if nothing is told for a while."""
    try:
        return end.until_failure(0.2)
    except TimeoutError:
        return None


def test_a_member_that_left_in_good_order_is_missed_only_if_it_is_needed(make):
    group = make(2)
    group.ask(play, 3, 1, 0.0)
    group.ask(leave, only=[1])
    assert group.ask(no_failure, only=[0])[0] is None, "it had done all that it was needed for"
    error = group.ask(begin, only=[0])[0]
    assert str(error) == "rank 1 left after call 0: call 1 cannot be agreed on without it"


def test_a_member_that_leaves_while_the_others_go_on_is_named(make):
    group = make(3)
    group.ask(play, 3, 1, 0.0)
    group.ask(begin, only=[0, 2])
    group.ask(leave, only=[1])
    # Across hosts followers hear of each other from the leader.
    for row in group.ask(fail_of, only=[0, 2]):
        assert row is None or row[0] == Failure(1, "agreement", "rank 1 left after call 0: call 1 cannot be agreed on without it")


def leave(end):
    end.agreement.close()


def begin(end):
    end.begin()


# ---------------------------------------------------------------------- divergence, injected
def test_members_that_took_another_sequence_are_told(counted):
    """A follower whose sequence is not the leader's: as if a decision had been replaced."""
    group = counted(2)
    group.ask(play, 4, 2, 0.0)
    group.ask(spoil_digest, only=[1])
    leader, follower = group.ask(play_and_tell, 5, 1, True)
    assert re.fullmatch(
        r"the members of a domain diverge: rank 1 expected decision \d+ of call 2 with digest [0-9a-f]{8}, rank 0 sent decision "
        r"\d+ of call 2, 1[FB]\d+, with digest [0-9a-f]{8}", follower), follower
    assert leader == follower, "the leader has heard it"


def test_members_in_different_calls_are_told(counted):
    group = counted(2)
    group.ask(play, 4, 2, 0.0)
    group.ask(begin, only=[1])
    follower = group.ask(play_and_tell, 5, 1)[1]
    assert re.search(r"rank 1 expected decision \d+ of call 3 .*, rank 0 sent decision \d+ of call 2, ", follower), follower


def test_members_whose_lanes_differ_are_told(counted):
    """The sending stage's members have not run one sequence: on one lane two messages come in another order."""
    group = counted(2)
    group.ask(begin)
    for index, order in enumerate([(0, 2), (2, 0)]):
        group.ask(receive, EDGES[0], order, only=[index])
    deadline = time.monotonic() + 10.0
    while (error := group.ask(look, only=[0])[0]) is None and time.monotonic() < deadline:
        pass
    assert re.fullmatch(
        "the members of a domain diverge: the first [12] messages of call 0 on edge 0>1 lane 0 came in another order, or were "
        "others, at rank 1: the sending stage's members have not run one sequence", str(error)), error


def test_a_decision_that_is_spoilt_or_lost_is_told(counted):
    group = counted(2)
    group.ask(play, 4, 1, 0.0)
    group.ask(begin)
    spoil = spoil_page if counted.kind == "shared-memory" else spoil_message
    group.ask(spoil, only=[0])
    error = group.ask(follow, only=[1])[1]
    expected = "cannot be read: .*corrupted" if counted.kind == "shared-memory" else "expected decision .*, rank 0 sent decision"
    assert isinstance(error, PipelineError) and re.search(expected, str(error)), error


def spoil_digest(end):
    end.agreement._digest ^= 1


def spoil_page(end):
    """The leader decides, and something writes over the record."""
    agreement, channel = end.agreement, end.agreement._channel
    agreement.decide(action_of(EDGES[0], 0))
    channel._page.bytes[channel._page.record(agreement._sequence) + 20] ^= 1


def spoil_message(end):
    """The leader decides twice, and the first decision does not leave."""
    put, end.agreement._channel.put = end.agreement._channel.put, lambda decision: True
    end.agreement.decide(action_of(EDGES[0], 0))
    end.agreement._channel.put = put
    end.agreement.decide(action_of(EDGES[0], 1))


def follow(end):
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if end.agreement.decide(None) is not None:
            raise AssertionError("it took the decision")
    return "nothing came"


def play_and_tell(end, seed, calls, fails=False):
    """Plays until it fails; as an engine would, tells the others of what is raised here. Returns the text.

    fails: it must; a leader that has said its last decision before a follower's failure comes waits for that.
    """
    try:
        play(end, seed, calls, 0.0)
        if fails:
            return end.until_failure().text
    except members.Failed as failed:
        return failed.args[0].text
    except PipelineError as error:
        end.agreement.abort(Failure(end.rank, "call", str(error)))
        return str(error)
    return "no error"


def receive(end, edge, microbatches):
    for microbatch in microbatches:
        end.agreement.arrived(edge, microbatch)


def look(end):
    end.agreement.common()


# ---------------------------------------------------------------------- opening
def opened(kind, tmp_path, hosts=None):
    """How opening a domain of two ends in each, over which channel they speak, and what is left after closing."""
    with Members(kind, (0, 1), tmp_path, hosts=hosts) as group:
        channels = group.ask(channel_of)
    return group.opened, channels, group.left_behind


def channel_of(end):
    return type(end.agreement._channel).__name__


def test_auto_takes_memory_where_it_is_shared_and_messages_elsewhere(tmp_path):
    assert opened("auto", tmp_path / "a")[1:] == (["SharedMemoryChannel"] * 2, [[], []])
    assert opened("auto", tmp_path / "b", hosts=["one", "two"])[1:] == (["MessageChannel"] * 2, [[], []])


def test_shared_memory_across_hosts_is_refused_on_every_member(tmp_path):
    errors, _, left = opened("shared-memory", tmp_path, hosts=["one", "two"])
    assert {str(error) for error in errors} == {
        "--rrfp-agreement shared-memory: rank 0 shares no memory with rank 0 (rank 1 is on another host): take messages, or auto"}
    assert all(isinstance(error, ConfigurationError) for error in errors) and left == [[], []]


def test_a_page_that_is_another_is_not_taken(tmp_path, monkeypatch):
    """`auto` proves the shared host: the nonce at the leader's descriptor must be the one that the leader has told."""
    exchange = opening._Opening._exchange

    def other_nonce(self, phase, record):
        if phase == "who" and self.leads:
            record = {**record, "page": [record["page"][0], "00" * 16]}
        return exchange(self, phase, record)

    monkeypatch.setattr(opening._Opening, "_exchange", other_nonce)
    assert opened("auto", tmp_path)[1:] == (["MessageChannel"] * 2, [[], []])


def test_a_member_that_does_not_come_is_named(tmp_path):
    with Members("auto", (0,), tmp_path, domain_ranks=(0, 1), deadline=0.3) as group:
        pass
    (error,) = group.opened
    text = r"ranks? 1 did not come within 0 s \(who\): look for .* first error, or raise the start-up deadline"
    assert re.fullmatch(text, str(error)), error
    assert group.left_behind == [[]]


def test_a_store_without_collectives_is_refused_and_all_closed_once(tmp_path):
    """Members have opened their memory by then: who has taken it over closes it, and the refusal is what is raised."""
    pytest.importorskip("torch")
    import rrfp.tp_coord.process_group  # noqa: F401 what importing opens is not counted

    store, errors, before = FileStore(tmp_path), {}, sorted(os.listdir("/proc/self/fd"))

    def member(rank):
        try:
            open_agreement("broadcast", domain=Domain((0, 1)), rank=rank, store=store, edges=[], deadline=20.0)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in (0, 1):
        assert isinstance(errors[rank], ConfigurationError) and "needs a store of torch" in str(errors[rank]), errors
    assert sorted(os.listdir("/proc/self/fd")) == before
