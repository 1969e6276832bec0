"""The fakes are strict, and each mistake that was made somewhere with the real thing deadlocks, corrupts or is an error on them."""

import threading

import numpy as np
import pytest
from fake_cuda import POISON, Deadlock, FakeDevice, Machine
from fake_nccl import Fabric
from hosts import play

SEEDS = range(30)


def pinned(device, value, size=8):
    memory = device.pinned(size)
    memory[:] = value
    return memory


def pair(*, seed=0, connections=8, resident=4, connect=()):
    machine = Machine(seed=seed, connections=connections)
    fabric = Fabric(machine, resident=resident)
    devices = [FakeDevice(machine, index) for index in range(2)]
    ends = [fabric.end(rank, device) for rank, device in enumerate(devices)]
    for name in connect:
        for end in ends:
            end.connected(name, (0, 1))
    return machine, devices, ends


# ------------------------------------------------------------------ streams, events, memory
def test_what_is_queued_happens_later():
    device = FakeDevice(Machine())
    memory, data = device.allocate(8), pinned(device, 7)
    device.copy(memory, data, device.compute)
    assert (memory == POISON).all()
    data[:] = 9  # changed before the stream gets to it
    device.synchronize(device.record(device.compute))
    assert (memory == 9).all()


def test_streams_are_in_order_and_not_among_each_other():
    orders = set()
    for seed in SEEDS:
        device, said = FakeDevice(Machine(seed=seed)), []
        other = device.stream()
        for index in range(3):
            device.kernel(lambda index=index: said.append(("a", index)))
            device.kernel(lambda index=index: said.append(("b", index)), other)
        device.machine.run()
        assert [index for name, index in said if name == "a"] == [index for name, index in said if name == "b"] == [0, 1, 2]
        orders.add(tuple(said))
    assert len(orders) > 3


def test_with_one_connection_a_wait_holds_up_every_stream():
    for connections in (1, 8):
        device = FakeDevice(Machine(connections=connections))
        other, never, done = device.stream(), device.stream(), []
        never_comes = device.record(never)
        never.ops.clear()
        device.machine.launches[device.index].clear()
        device.wait(other, never_comes)
        device.kernel(lambda: done.append(1))
        with pytest.raises(Deadlock, match="wait for an event"):
            device.machine.run()
        assert done == ([] if connections == 1 else [1])


def test_pageable_memory_other_threads_and_times_too_early_are_errors():
    device = FakeDevice(Machine())
    with pytest.raises(AssertionError, match="pageable"):
        device.copy(device.allocate(4), np.zeros(4, np.uint8), device.compute)
    errors = []

    def other():
        try:
            device.allocate(4)
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other, name="helper")
    thread.start()
    thread.join()
    assert errors == ["helper uses a device that it has not entered"]
    with pytest.raises(AssertionError, match="not complete"):
        device.seconds(device.record(device.compute), device.record(device.compute))


def test_memory_is_opened_by_others_only():
    machine = Machine()
    owner, other = FakeDevice(machine, 0, process="a"), FakeDevice(machine, 0, process="b")
    memory = owner.allocate(8)
    handle = owner.share(memory)
    other.copy(other.open(handle), pinned(other, 3), other.compute)
    machine.run()
    assert (memory == 3).all()
    with pytest.raises(OSError, match="own process"):
        owner.open(handle)
    with pytest.raises(OSError, match="no such memory"):
        other.open(b"nothing")
    with pytest.raises(OSError, match="can't be shared"):
        FakeDevice(machine, 1, reachable=False).share(memory)


# ------------------------------------------------------------------ NCCL
def test_a_pair_matches_in_order_of_issue():
    for seed in SEEDS:
        machine, (left, right), (a, b) = pair(seed=seed, connect=["edge"])
        sent = [pinned(left, value).view(type(left.allocate(1))) for value in (1, 2)]
        got = [right.allocate(8) for _ in range(2)]
        for one in sent:
            a.send("edge", one, 1, left.compute)
        for one in got:
            b.recv("edge", one, 0, right.compute)
        machine.run()
        assert [int(one[0]) for one in got] == [1, 2]


def test_an_operation_occupies_its_stream_until_it_is_matched():
    machine, (left, _), (a, _) = pair(connect=["edge"])
    done = []
    a.recv("edge", left.allocate(8), 1, left.compute)
    left.kernel(lambda: done.append(1))
    with pytest.raises(Deadlock, match=r"recv edge \(started\), kernel"):
        machine.run()
    assert not done


def test_two_threads_are_an_error():
    _, (left, _), (a, _) = pair(connect=["edge"])
    a.send("edge", left.allocate(1), 1, left.compute)
    errors = []

    def other():
        left.enter()
        try:
            a.send("edge", left.allocate(1), 1, left.compute)
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert errors == ["NCCL is called from two threads"]


# ------------------------------------------------------------------ the historical mistakes
def exchange(machine, device, end, peer, *, receive_first, send_on, receive_on):
    """One rank: sends one message and receives one, on the communicators that it is told, on one stream each communicator."""
    streams = {name: device.stream() for name in (send_on, receive_on)}

    def send():
        end.send(send_on, device.allocate(8), peer, streams[send_on])

    def receive():
        end.recv(receive_on, device.allocate(8), peer, streams[receive_on])

    for call in (receive, send) if receive_first else (send, receive):
        call()
        yield lambda: True


@pytest.mark.parametrize("resident", [1, 4])
def test_early_posted_receives_deadlock(resident):
    """Both post their receive first. With one communicator and stream for both directions that never ends; nor with two where a
    device runs one operation at a time."""
    def run(shared):
        for seed in SEEDS:
            machine, devices, ends = pair(seed=seed, resident=resident, connect=["0>1", "1>0"])
            names = [("0>1", "0>1"), ("0>1", "0>1")] if shared else [("0>1", "1>0"), ("1>0", "0>1")]
            play(machine, [exchange(machine, devices[r], ends[r], 1 - r, receive_first=True, send_on=names[r][0], receive_on=names[r][1])
                           for r in range(2)], seed=seed)

    with pytest.raises(Deadlock, match=r"recv .* \(started\)"):
        run(shared=True)
    if resident == 1:
        with pytest.raises(Deadlock):
            run(shared=False)
    else:
        run(shared=False)


def test_one_communicator_for_both_directions_couples_them():
    """Rank 0 sends before it receives, rank 1 too: on one stream each send waits for a receive behind the other's send."""
    def run(names):
        machine, devices, ends = pair(connect=["0>1", "1>0"])
        play(machine, [exchange(machine, devices[r], ends[r], 1 - r, receive_first=False, send_on=names[r], receive_on=names[1 - r])
                       for r in range(2)])

    run(["0>1", "1>0"])
    with pytest.raises(Deadlock):
        run(["0>1", "0>1"])


def test_lazy_connection_blocks_the_host():
    """Connecting at first use waits for the peer's first use: with orders that differ both hosts wait inside a call."""
    def host(end, names, ranks):
        for name in names:
            yield lambda name=name: end.connected(name, ranks)

    def run(orders):
        machine, _, ends = pair()
        play(machine, [host(end, names, (0, 1)) for end, names in zip(ends, orders, strict=True)])

    run([["0>1", "1>0"], ["0>1", "1>0"]])
    with pytest.raises(Deadlock, match=r"hosts \[0, 1\] wait for ever"):
        run([["0>1", "1>0"], ["1>0", "0>1"]])
    machine, (left, _), (a, b) = pair()
    a.connected("edge", (0, 1))
    with pytest.raises(Deadlock, match="before rank 1 has connected"):
        a.send("edge", left.allocate(1), 1, left.compute)


@pytest.mark.parametrize("resident", [1, 4])
def test_another_order_on_two_ranks_deadlocks_where_operations_do_not_overlap(resident):
    """A collective and a transfer, each on a communicator and a stream of its own, issued in opposite orders."""
    def host(device, end, peer, transfer_first):
        streams = device.stream(), device.stream()

        def transfer():
            operation = end.send if end.rank == 0 else end.recv
            operation("edge", device.allocate(8), peer, streams[0])

        def collective():
            end.all_reduce("group", peer, streams[1])

        for call in (transfer, collective) if transfer_first else (collective, transfer):
            call()
            yield lambda: True

    def run(firsts):
        for seed in SEEDS:
            machine, devices, ends = pair(seed=seed, resident=resident, connect=["edge", "group"])
            play(machine, [host(devices[r], ends[r], 1 - r, firsts[r]) for r in range(2)], seed=seed)

    run([True, True])
    run([False, False])
    if resident == 1:
        with pytest.raises(Deadlock):
            run([True, False])
    else:
        run([True, False])


def test_a_buffer_that_is_reused_before_its_event_is_corrupt():
    """A kernel is queued that reads a buffer; the host lets go of it, and a copy of the next message lands in it."""
    def run(wait):
        wrong = 0
        for seed in SEEDS:
            device, got = FakeDevice(Machine(seed=seed)), []
            transfers, buffer = device.stream(), device.allocate(8)
            for value in (1, 2):
                device.copy(buffer, pinned(device, value), transfers)
                device.synchronize(device.record(transfers))
                device.kernel(lambda: got.append(int(buffer[0])))
                if wait:
                    device.synchronize(device.record(device.compute))
            device.machine.run()
            wrong += got != [1, 2]
        return wrong

    assert run(wait=True) == 0
    assert run(wait=False) > 0
