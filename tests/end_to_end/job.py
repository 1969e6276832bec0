"""Training jobs of bare processes: `job_server.py` in a process of its own, the jobs it runs, and what a job may leave behind."""

import atexit
import functools
import itertools
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rrfp.comm.mailbox import Mailbox
from rrfp.comm.ports import reserve_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
"""What every process of a test's job is given."""


def environments(ranks: int, *, port: int | None = None, **common: str) -> list[dict[str, str]]:
    """What torchrun would set for each rank of a job on this host, and `common`."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or reserve_port())}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | job | common for rank in range(ranks)]


@functools.cache
def prepare_data() -> tuple[str, ...]:
    """The arguments of a tiny GPT on real text, which is prepared once for all tests of this process."""
    directory = tempfile.TemporaryDirectory(prefix="rrfp-data-")
    atexit.register(directory.cleanup)
    subprocess.run([sys.executable, str(ROOT / "scripts/prepare_data.py"), directory.name], check=True, timeout=120, capture_output=True,
                   env=os.environ | VARIABLES)
    return tuple((ROOT / "scripts/tiny_gpt.args").read_text().split() + Path(directory.name, "text.args").read_text().split())


class Job:
    """One job of a server. `pids` are its ranks."""

    def __init__(self, pids: list[int], outputs: list[Path], events: Mailbox):
        self.pids, self._outputs, self._events = pids, outputs, events
        self.start = time.monotonic()
        self.codes: dict[int, int] = {}
        self.ends: dict[int, float] = {}
        """When each rank ended, on `time.monotonic()`."""

    def left(self) -> set[int]:
        """Ranks that are not known to have ended."""
        return set(range(len(self.pids))) - set(self.codes)

    def ended(self, *, deadline: float, stopped: int | None = None) -> bool:
        """Whether all ranks end within `deadline` seconds. Once all others have ended, `stopped` is killed."""
        until, asked = time.monotonic() + deadline, False
        while left := self.left():
            if left == {stopped} and not asked:
                os.kill(self.pids[stopped], signal.SIGKILL)
                asked = True
            try:
                event = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return False
            self.codes[event["rank"]], self.ends[event["rank"]] = event["code"], event["when"]
        return True

    def wait(self, *, deadline: float, stopped: int | None = None) -> None:
        """Wait for all ranks, as `ended`. What is still there after `deadline` seconds is killed."""
        if not self.ended(deadline=deadline, stopped=stopped):
            for rank in self.left():
                os.kill(self.pids[rank], signal.SIGKILL)
            assert self.ended(deadline=30), f"ranks {self.left()} can't be killed"

    def output(self, rank: int) -> str:
        return self._outputs[rank].read_text(errors="replace")


class Server:
    """`job_server.py` for one script. Any thread may start jobs, and they run side by side.

    untouched: the script loads nothing of RRFP but its CPU mode when it is imported, so that "megatron" is the baseline.
    """

    def __init__(self, script: Path | str, *, untouched: bool = True):
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "job_server.py"), str(script), *([] if untouched else ["--touched"])], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | VARIABLES | {"LOCAL_WORLD_SIZE": "4"})
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._boxes: dict[int, Mailbox] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            if line.startswith("{"):  # imports may say things of their own
                event = json.loads(line)
                self._boxes[event["job"]].put(event)

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(10)
        self._process.stdout.close()

    def start(self, way: str, argv: list[str], *, variables: list[dict[str, str]], folder: Path) -> Job:
        """Start a job with one rank for each of `variables`, by `way` ("rrfp" or "megatron"). Its output goes into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        outputs = [folder / f"out{rank}.txt" for rank in range(len(variables))]
        with self._lock:
            number = next(self._numbers)
            events = self._boxes[number] = Mailbox()
            job = {"job": number, "way": way, "argv": argv, "env": variables, "output": list(map(str, outputs))}
            print(json.dumps(job), file=self._process.stdin, flush=True)
            return Job(events.get(timeout=120)["pids"], outputs, events)


@functools.cache
def server(script: Path | str, *, untouched: bool = True) -> Server:
    """The one server of that script for all tests of this process: it takes seconds to start."""
    started = Server(script, untouched=untouched)
    atexit.register(started.close)
    return started


# ------------------------------------------------------------------------------------------------- what may be left of a job
def processes(folder: Path) -> list[int]:
    """Those that write into `folder`, or were started with its name in their environment."""

    def uses(pid: str) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/fd/1").startswith(str(folder)) or str(folder) in Path(f"/proc/{pid}/environ").read_text(errors="replace")
        except OSError:
            return False

    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid() and uses(pid)]


def nothing_left(folder: Path, *, pids: list[int] = (), port: str | int = 0, deadline: float = 20.0) -> None:
    """No process of the job is left `deadline` seconds from now, nor shared memory, nor a socket of ours, nor its port in use."""
    until = time.monotonic() + deadline
    for pid in processes(folder):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} is left"
    # torch and Python name their segments by the process that made them.
    names = [name for name in os.listdir("/dev/shm") if set(re.findall(r"\d+", name)) & set(map(str, pids))]
    assert not names, f"shared memory is left: {names}"
    assert not listening(port), f"port {port} is in use"


def listening(port: str | int) -> bool:
    """Whether some socket of this host listens at `port` (proc(5): state 0A)."""
    wanted = f":{int(port):04X}"
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return any(row[1].endswith(wanted) and row[3] == "0A" for row in rows)


