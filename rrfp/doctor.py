"""`rrfp doctor`: what is here, what would be used, what is missing; run on all ranks it also tests every edge of the pipeline.

    rrfp doctor
    torchrun --nproc-per-node 4 -m rrfp doctor

The second opens the transport that training uses between every two neighbours, one pair at a time and independent of the others,
so that what fails is named by its edge. It needs no process group. Every wait has a deadline.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import logging
import os
import platform
import queue
import socket
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import zmq

from rrfp import __version__, doctor_gpu
from rrfp.action import Edge, parse_edge
from rrfp.comm import rendezvous
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.transport import Arrival, Failure, Part
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.errors import ConfigurationError, PipelineError, RRFPError

MEGATRON = "megatron-core>=0.17.1,<0.20"
OLDEST, NEWEST = (0, 17, 1), (0, 20)
SMALL_BYTES, LARGE_BYTES = 64, 16 << 20
SMALL_TURNS, LARGE_TURNS = 50, 8


def main(argv: list[str]) -> int:
    """Print the report. Returns 0 if training can run here, and every edge works if all ranks are here; else 1.

    Raises:
        ConfigurationError: an environment (RANK, WORLD_SIZE) or option that makes no sense.
    """
    parser = argparse.ArgumentParser(prog="rrfp doctor", description="what is here, what would be used, what is missing")
    parser.add_argument("--interface", help="as --rrfp-interface: network interface or address for messages between hosts")
    parser.add_argument("--store", metavar="DIR", help="where ranks meet: a directory that all see; by default the job's own store")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="most that one edge may take (%(default)g)")
    options = parser.parse_args(argv)
    rank, ranks = whole("RANK", 0), whole("WORLD_SIZE", 1)
    if not 0 <= rank < ranks:
        raise ConfigurationError(f"RANK={rank} with WORLD_SIZE={ranks}: a rank is below WORLD_SIZE; start all ranks with torchrun")
    lines, missing = inspect(options.interface)
    if rank == 0:
        print("\n".join(f"{label + ':':<24}{text}" for label, text in lines))
    for text in missing:
        print(f"{f'rank {rank}: ' if ranks > 1 else ''}MISSING: {text}", flush=True)
    works = not missing
    if ranks > 1:
        works &= edges(options, rank, ranks)
    elif rank == 0:
        print("edges:                  not tested; run on all ranks: torchrun --nproc-per-node N -m rrfp doctor")
    if rank == 0:
        print("all is well" if works else "not ready: see above")
    return 0 if works else 1


def whole(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdigit():
        raise ConfigurationError(f"{name}={value}: a whole number is needed; torchrun sets it")
    return int(value)


# ------------------------------------------------------------------ what is here
def inspect(interface: str | None) -> tuple[list[tuple[str, str]], list[str]]:
    """Lines of (what, how it is), and what keeps training from running. Imports torch, but not megatron."""
    missing: list[str] = []
    lines = [("rrfp", __version__), ("python", f"{platform.python_version()} ({sys.executable})")]
    lines += [("numpy", np.__version__), ("pyzmq", f"{zmq.__version__} (libzmq {zmq.zmq_version()})")]
    lines += torch_lines(missing) + megatron_lines(missing)
    lines += [("transformer engine", transformer_engine()), ("NVIDIA Apex extensions", apex()),
              ("gradient fusion", doctor_gpu.fusion(find, find("transformer_engine") is not None)), ("matplotlib", matplotlib())]
    return lines + transport_lines(interface, missing), missing


def torch_lines(missing: list[str]) -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        missing.append(f"torch can't be imported ({error}): install the build for your machine, https://pytorch.org/get-started")
        return [("torch", "missing")]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        device = f"{count} x {torch.cuda.get_device_name(0)}"
    else:
        device = "CPU only (torch.cuda.is_available() says so): train with `python -m rrfp --cpu SCRIPT` or rrfp.install(cpu=True)"
    return [("torch", torch.__version__), ("device", device), *doctor_gpu.gpu_lines(torch)]


def megatron_lines(missing: list[str]) -> list[tuple[str, str]]:
    core, training = find("megatron.core"), find("megatron.training")
    if core is None:
        missing.append(f"megatron-core: run from a Megatron-LM checkout, or pip install '{MEGATRON}'")
        return [("megatron-core", "missing"), ("megatron.training", "missing")]
    version = megatron_version(core)
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < NEWEST:
        missing.append(f"megatron-core {version} is not supported (0.17.1 to 0.19.x are): pip install '{MEGATRON}'")
    where = training or "missing: `python -m rrfp SCRIPT` needs it (a Megatron-LM checkout has it), rrfp.install() doesn't"
    return [("megatron-core", f"{version} ({core})"), ("megatron.training", where)]


def megatron_version(folder: str) -> str:
    """Of the tree that would be imported, which a checkout in the way of an installed wheel decides."""
    found = {}
    with contextlib.suppress(OSError):
        for line in (Path(folder) / "package_info.py").read_text().splitlines():
            name, equals, value = line.partition(" = ")
            if equals and name in ("MAJOR", "MINOR", "PATCH"):
                found[name] = value.strip()
    if len(found) == 3:
        return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}"
    return version("megatron-core") or "unknown"


def transformer_engine() -> str:
    found = next((v for name in ("transformer-engine", "transformer-engine-torch") if (v := version(name))), None)
    return doctor_gpu.transformer_engine(find("transformer_engine") is not None, found)


def apex() -> str:
    extensions = [name for name in ("amp_C", "fused_layer_norm_cuda", doctor_gpu.FUSED) if find(name)]
    if extensions:
        return ", ".join(extensions)
    folder = find("apex")
    if folder is None:
        return "not installed: Megatron uses torch's optimizers and norms"
    if (Path(folder) / "normalization").is_dir():
        return f"NVIDIA's apex without its compiled extensions ({folder}): Megatron uses torch's optimizers and norms"
    return f"none; the package `apex` at {folder} is an unrelated project of that name: pip uninstall apex"


def matplotlib() -> str:
    return version("matplotlib") or "not installed: `rrfp trace` then draws no picture; pip install matplotlib"


def transport_lines(interface: str | None, missing: list[str]) -> list[tuple[str, str]]:
    identity = rendezvous.host_identity()
    try:
        address = rendezvous.own_address(interface)
    except ConfigurationError as error:
        address = f"none: {error}"
    memory, watch = memory_files(), hasattr(os, "pidfd_open") and not fails(lambda: os.close(os.pidfd_open(os.getpid())))
    if not zmq.has("curve"):
        missing.append("pyzmq without CURVE: messages could not be authenticated; pip install --force-reinstall pyzmq")
    if not memory:
        missing.append("anonymous memory files (memfd_create, /proc/<pid>/fd): Linux with /proc mounted is needed")
    death = "process descriptors" if watch else "heartbeats and broken connections (no pidfd_open: a lost rank is noticed later)"
    return [
        ("host", f"{socket.gethostname()} ({identity})"),
        ("address", address),
        ("authentication", "CURVE" if zmq.has("curve") else "missing"),
        ("inside a host", "payload through shared memory (memfd), the rest over abstract sockets" if memory else "missing"),
        ("between hosts", "payload and the rest over tcp"),
        ("a lost rank is seen by", death),
    ]


def memory_files() -> bool:
    """Whether this process can make one and reach it as a peer would."""
    def attempt():
        descriptor = os.memfd_create("rrfp-doctor", os.MFD_CLOEXEC)
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
        finally:
            os.close(descriptor)

    return hasattr(os, "memfd_create") and not fails(attempt)


def fails(attempt) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def find(module: str) -> str | None:
    """Where a module would be imported from (a package's folder), without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    return folders[0] if folders else spec.origin


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------ every edge
def edges(options: argparse.Namespace, rank: int, ranks: int) -> bool:
    """Test this rank's edges; rank 0 prints those of all. Whether all that this rank knows of work."""
    try:
        store = open_store(options, rank, ranks)
    except Exception as error:  # torch raises several kinds
        print(f"rank {rank}: no edge can be tested, the ranks' meeting place can't be reached: {error}", flush=True)
        return False
    results: dict[str, dict] = {}
    # Pairs that begin at an even rank, then the others, which allow for a partner whose first pair has run into its deadline.
    for parity in (0, 1):
        for low in (rank - 1, rank):
            if low % 2 == parity and 0 <= low < ranks - 1:
                results |= test_pair(options, rank, low, store, deadline=options.timeout * (1 + parity))
    for edge, result in results.items():
        if "error" in result:
            print(f"rank {rank}: edge {edge} FAILED: {result['error']}", flush=True)
    return gather(store, rank, ranks, results, until=time.monotonic() + 4 * options.timeout)


def open_store(options: argparse.Namespace, rank: int, ranks: int) -> rendezvous.Store:
    if options.store:
        return rendezvous.FileStore(options.store)
    from torch.distributed import PrefixStore, TCPStore

    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ConfigurationError("MASTER_ADDR and MASTER_PORT are not set: start with torchrun, or give --store DIR")
    # Under torchrun the agent may keep the store already; see torch/distributed/rendezvous.py, _create_c10d_store.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(os.environ["MASTER_ADDR"], whole("MASTER_PORT", 0), ranks, rank == 0 and not agent,
                     timeout=datetime.timedelta(seconds=options.timeout), wait_for_workers=False)
    return PrefixStore(f"rrfp-doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def test_pair(
    options: argparse.Namespace, rank: int, low: int, store: rendezvous.Store, *, deadline: float
) -> dict[str, dict]:
    """Open the transport between `low` and `low + 1`. Returns what this rank finds of its outgoing edge of the two."""
    peer = low + 1 if rank == low else low
    mine, theirs, name = Edge(rank, peer), Edge(peer, rank), f"pair-{low}"
    transport = ZmqTransport(rank=rank, edges_in=[theirs], edges_out=[mine], owner={rank: rank, peer: peer}, store=store,
                             interface=options.interface, namespace=name)
    events = Mailbox()
    until = time.monotonic() + deadline
    try:
        with warnings_of("rrfp.comm.outbound") as said:
            transport.open(events.put, deadline=deadline)
            transport.begin(0)
            pair = Pair(transport, events, mine, until=until)
            if rank == low:
                result = pair.measure()
                pair.answer()
            else:
                pair.answer()
                result = pair.measure()
        host = rendezvous.collect(store, name, "who", [peer], until=until)[peer]["host"]
        shared = host == rendezvous.host_identity()
        result["path"] = "tcp" if not shared else f"socket, {said[0]}" if said else "shared memory"
        transport.close(deadline=options.timeout)
    except (RRFPError, OSError, zmq.ZMQError) as error:
        with contextlib.suppress(PipelineError):
            transport.close(deadline=1.0)
        result = {"error": str(error)}
    return {str(mine): result}


class Pair:
    """Two ranks and the edges between them: one measures, the other answers each message with a small one."""

    def __init__(self, transport: ZmqTransport, events: Mailbox, out: Edge, *, until: float):
        self._transport, self._events, self._out, self._until = transport, events, out, until
        self._sent = 0

    def measure(self) -> dict:
        """Seconds one way of a small message, and bytes per second of a large one: medians."""
        latency = statistics.median(self._turn(SMALL_BYTES) for _ in range(SMALL_TURNS)) / 2
        # The first ones grow the receiver's buffers and touch their pages.
        large = statistics.median([self._turn(LARGE_BYTES) for _ in range(LARGE_TURNS)][LARGE_TURNS // 2:])
        return {"latency": latency, "rate": LARGE_BYTES / max(large - latency, 1e-9)}

    def answer(self) -> None:
        for _ in range(SMALL_TURNS + LARGE_TURNS):
            self._receive()
            self._send(SMALL_BYTES)

    def _turn(self, nbytes: int) -> float:
        start = time.perf_counter()
        self._send(nbytes)
        self._receive()
        return time.perf_counter() - start

    def _send(self, nbytes: int) -> None:
        part = Part("uint8", (nbytes,), np.zeros(nbytes, np.uint8))
        self._transport.send(self._out, self._sent, (part,))
        self._sent += 1

    def _receive(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=max(0.0, self._until - time.monotonic()))
            except queue.Empty:
                raise PipelineError(f"no message from rank {self._out.destination} in time") from None
            if isinstance(event, Failure):
                raise PipelineError(f"rank {event.rank} {'was lost' if event.lost else 'failed'} ({event.where}): {event.text}")
            if isinstance(event, Arrival):
                self._transport.consumed(event)
                self._transport.release(event)
                return


@contextlib.contextmanager
def warnings_of(logger: str):
    """What a logger warns of, as a list that fills. It still goes where it goes."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)


def gather(store: rendezvous.Store, rank: int, ranks: int, results: dict[str, dict], *, until: float) -> bool:
    """Rank 0 prints every rank's results, and keeps the store until all are in. Whether everything that this rank saw works."""
    works = not any("error" in result for result in results.values())
    try:
        rendezvous.publish(store, "edges", "results", rank, results)
        if rank != 0:
            # Stay until rank 0 has printed: torchrun ends everybody as soon as one rank ends with an error.
            with contextlib.suppress(PipelineError, RuntimeError):  # rank 0 has gone, and the store with it
                rendezvous.collect(store, "edges", "printed", [0], until=until)
            return works
        for other in range(ranks):
            try:
                found = rendezvous.collect(store, "edges", "results", [other], until=until)[other]
            except PipelineError:
                works = False
                print(f"rank {other} gave no result: look for its first error")
                continue
            for edge, result in sorted(found.items(), key=lambda item: parse_edge(item[0])):
                works &= "error" not in result
                print(f"{f'edge {edge}:':<24}{line(result)}")
        rendezvous.publish(store, "edges", "printed", 0, {})
    except (PipelineError, RuntimeError, OSError) as error:  # the store's own is a RuntimeError
        print(f"rank {rank}: the ranks' meeting place is gone: {error}", flush=True)
        return False
    return works


def line(result: dict) -> str:
    if "error" in result:
        return f"FAILED: {result['error']}"
    size = LARGE_BYTES >> 20
    return f"{result['path']}, {1e6 * result['latency']:.0f} us one way, {result['rate'] / 1e9:.2f} GB/s ({size} MB messages)"
