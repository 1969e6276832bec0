"""What the CPU transport costs: bandwidth, control latency beside payloads, and how soon a busy rank learns of an arrival.

    python benchmarks/transport.py [--quick]

Two processes on this host. Arrival to ready is measured from the sender's `send` to the receiver's inbox, with a 64 kB message,
while the receiver's main thread does what the row says; "cost" is how much longer that work took than without traffic.
"""

import argparse
import multiprocessing
import queue
import statistics
import sys
import tempfile
import time

import numpy as np

from rrfp.action import Edge
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Announcement, Arrival, Part
from rrfp.comm.zmq_transport import ZmqTransport

THERE, BACK = Edge(0, 1), Edge(1, 0)
MIB = 1 << 20


def open_rank(rank, directory, wire, **options):
    transport, box = (
        ZmqTransport(
            rank=rank,
            edges_in=[(BACK, THERE)[rank]],
            edges_out=[(THERE, BACK)[rank]],
            owner={0: 0, 1: 1},
            store=FileStore(directory),
            interface="127.0.0.1",
            host=f"host{rank}" if wire == "tcp" else None,
            **options,
        ),
        Mailbox(),
    )
    transport.open(box.put, deadline=60.0)
    transport.begin(0)
    return transport, box


def part(nbytes):
    return (Part("uint8", (nbytes,), np.full(nbytes, 1, np.uint8)),)


def done(transport, arrival):
    transport.consumed(arrival)
    transport.release(arrival)


def receive(transport, box, kind=Arrival):
    while True:
        event = box.get(timeout=60.0)
        if isinstance(event, kind):
            return event


def percentiles(samples, scale=1e6):
    ordered = sorted(samples)
    return [scale * ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.99)]


# ------------------------------------------------------------------------------------------------------------- (a) bandwidth
def bandwidth(rank, directory, wire, sizes, repeats, results):
    transport, box = open_rank(rank, directory, wire)
    for size in sizes:
        for label, count in (("warm", 8), ("timed", repeats), ("timed", repeats), ("timed", repeats)):
            start = time.perf_counter()
            if rank == 0:
                payload = part(size)
                for microbatch in range(count):
                    transport.send(THERE, microbatch, payload)
                done(transport, receive(transport, box))
                if label == "timed":
                    results.put((size, count * size / (time.perf_counter() - start)))
            else:
                for _ in range(count):
                    done(transport, receive(transport, box))
                transport.send(BACK, 0, ())
    transport.close(deadline=10.0)


def best(speeds):
    """Of the rounds: whoever else uses the machine only ever slows one down."""
    return {size: max(speed for key, speed in speeds if key == size) for size, _ in speeds}


def memcpy_speed(size, repeats):
    """Into five buffers in turn, as the transport does: one alone would stay in the cache."""
    source, targets = np.full(size, 1, np.uint8), [np.full(size, 2, np.uint8) for _ in range(5)]
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for number in range(repeats):
            np.copyto(targets[number % 5], source)
        rounds.append(repeats * size / (time.perf_counter() - start))
    return max(rounds)


# ------------------------------------------------------------------------------------------------------- (b) control latency
def control(rank, directory, wire, size, count, results):
    transport, box = open_rank(rank, directory, wire)
    if rank == 1:
        for number in range(count):
            if size:
                done(transport, receive(transport, box))
            else:
                receive(transport, box, Announcement)
            if size and number % 4 == 0 or not size:
                transport.announce(BACK, number % 1000, time.monotonic())  # the "duration" carries the time it was sent
        transport.close(deadline=10.0)
        return
    latencies, payload = [], part(size) if size else ()
    for number in range(count):
        if size:
            transport.send(THERE, number, payload)
        else:
            transport.announce(THERE, number, 0.0)
            event = receive(transport, box, Announcement)
            latencies.append(event.time - event.duration)
    while size and len(latencies) < len(range(0, count, 4)):
        event = receive(transport, box, Announcement)
        latencies.append(event.time - event.duration)
    results.put(latencies)
    transport.close(deadline=10.0)


# ------------------------------------------------------------------------------------------------------ (c, d) arrival to ready
def spin(seconds):
    """Hold the interpreter lock: pure Python that never waits. Returns the loops done."""
    loops, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        loops += 1
    return loops


def work(how, seconds):
    """One action of about 5 ms. spin holds the interpreter lock for 4 of them; numpy and sleep let go of it."""
    if how == "sleep":
        time.sleep(seconds)
    elif how == "numpy":
        for _ in range(12):
            _MATRIX @ _MATRIX
    else:
        spin(0.004)
        time.sleep(0.001)


_MATRIX = np.ones((256, 256), np.float32)


def busy(rank, directory, how, interval, count, traffic, results):
    """Rank 0 sends a message every 5 ms; rank 1 works, and takes its inbox at action boundaries as the engine does."""
    if interval is not None and rank == 1:
        sys.setswitchinterval(interval)
    transport, box = open_rank(rank, directory, "ipc", credits=16, slot_bytes=1 << 16)
    if rank == 0:
        payload = part(1 << 16)
        receive(transport, box, Announcement)
        rng = np.random.default_rng(0)
        for microbatch in range(count if traffic else 0):
            stamped = (Part("float64", (1,), np.array([time.monotonic()]).view(np.uint8)), *payload)
            transport.send(THERE, microbatch, stamped)
            time.sleep(rng.uniform(0.002, 0.008))
        receive(transport, box, Announcement)
        transport.close(deadline=10.0)
        return
    latencies, posted = [], {}
    transport._post = lambda event: (posted.__setitem__(id(event), time.monotonic()), box.put(event))
    transport.announce(BACK, 0, 0.0)
    actions, start = 0, time.perf_counter()
    received = 0
    until = start + count * 0.005
    while (received < count) if traffic else (time.perf_counter() < until):
        work(how, 0.005)
        actions += 1
        while not box.empty():
            event = box.get()
            if isinstance(event, Arrival):
                received += 1
                sent = event.payload[0].data.view(np.float64)[0]
                latencies.append(posted.pop(id(event)) - sent)
                done(transport, event)
    elapsed = time.perf_counter() - start
    results.put((latencies, elapsed / actions))
    transport.announce(BACK, 0, 0.0)
    transport.close(deadline=10.0)


def python_cost(rank, directory, interval, traffic, count, results):
    """How many pure-Python loops the receiver's main thread gets done in 5 ms (median) while messages flow."""
    if interval is not None and rank == 1:
        sys.setswitchinterval(interval)
    transport, box = open_rank(rank, directory, "ipc", credits=16, slot_bytes=1 << 16)
    if rank == 0:
        payload = part(1 << 16)
        receive(transport, box, Announcement)
        for microbatch in range(count if traffic else 0):
            transport.send(THERE, microbatch, payload)
            time.sleep(0.005)
        receive(transport, box, Announcement)
    else:
        transport.announce(BACK, 0, 0.0)
        loops = []
        for _ in range(count):
            loops.append(spin(0.005))
            while not box.empty():
                event = box.get()
                if isinstance(event, Arrival):
                    done(transport, event)
        results.put(statistics.median(loops))
        transport.announce(BACK, 0, 0.0)
    transport.close(deadline=10.0)


def pair(target, *arguments):
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        results = context.Queue()
        ranks = [context.Process(target=target, args=(rank, directory, *arguments, results)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        answers = []
        while any(rank.is_alive() for rank in ranks) or not results.empty():
            try:
                answers.append(results.get(timeout=0.2))
            except queue.Empty:
                continue
        for rank in ranks:
            rank.join(60)
            if rank.exitcode:
                raise SystemExit(f"a rank ended with {rank.exitcode}")
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    quick = parser.parse_args().quick
    repeats, count = (10, 100) if quick else (40, 1000)

    print("(a) payload bandwidth                memcpy GB/s   ipc GB/s   of memcpy   tcp (encrypted) GB/s")
    sizes = [8 * MIB, 16 * MIB, 64 * MIB]
    inside = best(pair(bandwidth, "ipc", sizes, repeats))
    across = best(pair(bandwidth, "tcp", sizes, max(5, repeats // 4)))
    for size in sizes:
        copy, ours, theirs = (speed / 1e9 for speed in (memcpy_speed(size, repeats), inside[size], across[size]))
        print(f"    {size // MIB:3d} MiB {copy:32.1f} {ours:10.1f} {ours / copy:10.0%} {theirs:14.2f}")

    print("(b) one-way control latency, us                    p50      p99")
    for wire in ("ipc", "tcp"):
        for label, size in (("quiet", 0), ("beside 16 MiB payloads", 16 * MIB)):
            (latencies,) = pair(control, wire, size, count if not size else max(100, count // 4))
            print(f"    {wire} {label:42s} {percentiles(latencies)[0]:8.0f} {percentiles(latencies)[1]:8.0f}")

    print("(c, d) send to inbox, us; the receiver's main thread     p50      p99   action ms (alone)")
    rows = [("spins 4 of 5 ms", "spin", None), ("spins, switch interval 0.5 ms", "spin", 5e-4),
            ("spins, switch interval 0.1 ms", "spin", 1e-4), ("multiplies matrices (numpy)", "numpy", None),
            ("multiplies, switch interval 0.1 ms", "numpy", 1e-4), ("sleeps", "sleep", None)]  # fmt: skip
    for label, how, interval in rows:
        ((latencies, action),) = pair(busy, how, interval, count, True)
        ((_, alone),) = pair(busy, how, interval, count, False)
        p50, p99 = percentiles(latencies)
        print(f"    {label:50s} {p50:8.0f} {p99:8.0f}   {1e3 * action:6.2f} ({1e3 * alone:.2f})")

    print("    pure Python without pause: loops lost to 200 messages/s")
    for interval in (None, 5e-4, 1e-4):
        (alone,), (beside,) = pair(python_cost, interval, False, count), pair(python_cost, interval, True, count)
        print(f"        switch interval {1e3 * (interval or 0.005):.1f} ms {1 - beside / alone:30.1%}")


if __name__ == "__main__":
    main()
