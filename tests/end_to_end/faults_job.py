"""Runs a training job of four ranks with a fault, and says what became of each: bare processes, or under torchrun."""

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import job  # noqa: E402
from job import HERE, ROOT, VARIABLES  # noqa: E402

from rrfp.comm.ports import reserve_port  # noqa: E402

SCRIPT = HERE / "faults_script.py"
RANKS = 4
MICROBATCHES = 8


@dataclass
class Ended:
    """One rank of a job. `seconds` counts from the fault (from the start of the job if there was none)."""

    rank: int
    pid: int
    code: int
    seconds: float
    output: str
    report: str
    """Its failure report, empty if it wrote none."""

    @property
    def said(self) -> list[str]:
        """Its own lines, without those that every run prints."""
        return [line for line in self.output.splitlines() if line.startswith("[rrfp] stage")]


def name(rank: int) -> str:
    return f"stage {rank} (rank {rank})"


def report(folder: Path, rank: int) -> str:
    """What that rank wrote into the report of the job's one failure; empty if nothing."""
    return next((path.read_text() for path in folder.glob(f"rrfp-failure-*/rank{rank}.txt")), "")


def marked(fault: dict, folder: Path) -> dict:
    return {**fault, "mark": str(folder / "mark")} if fault else {}


def run(server: job.Server, folder: Path, arguments: list[str], *, fault: dict | None = None, port: int | None = None, ranks: int = RANKS,
        pipeline: int | None = None, way: str = "rrfp", deadline: float = 100.0, **variables: str) -> list[Ended]:
    """Run the job to its end, and see that nothing is left of it. A rank that stopped itself is killed after all others have ended.

    pipeline: its size (default: `ranks`).
    """
    fault = marked(fault or {}, folder)
    environments = job.environments(ranks, port=port, RRFP_REPORT_DIR=str(folder), RRFP_TEST_FAULT=json.dumps(fault), **variables)
    size = ["--pipeline-model-parallel-size", str(pipeline or ranks)]
    started = server.start(way, [*arguments, *size], variables=environments, folder=folder)
    started.wait(deadline=deadline, stopped=fault["rank"] if fault.get("what") == "stop" else None)
    zero = float(Path(fault["mark"]).read_text()) if fault and Path(fault["mark"]).exists() else started.start
    ended = [Ended(rank, started.pids[rank], started.codes[rank], started.ends[rank] - zero, started.output(rank), report(folder, rank))
             for rank in range(ranks)]
    for end in ended:
        print(f"rank {end.rank}: exit status {end.code} after {end.seconds:.1f} s\n{end.output[-6000:]}\n")
    assert not fault or Path(fault["mark"]).exists(), "the fault did not happen"
    job.nothing_left(folder, pids=started.pids, port=environments[0]["MASTER_PORT"])
    return ended


def torchrun(folder: Path, arguments: list[str], *, faults: list[dict], ranks: int, deadline: float = 250.0) -> tuple[subprocess.CompletedProcess, float]:
    """The same under torchrun, with as many starts as `faults` (an empty one: none happens). Each rank's output is in `logs`.

    Returns the ended torchrun, and the seconds from the last fault to its end.
    """
    port = reserve_port()
    variables = VARIABLES | {"RRFP_REPORT_DIR": str(folder), "RRFP_TEST_FAULT": json.dumps([marked(fault, folder) for fault in faults])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port),
               "--max-restarts", str(len(faults) - 1), "--monitor-interval", "0.1", "--redirects", "3", "--log-dir", str(folder / "logs"),
               "-m", "rrfp", "--cpu", str(SCRIPT), *arguments, "--pipeline-model-parallel-size", str(ranks)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, timeout=deadline, capture_output=True, text=True)
    seconds = time.monotonic() - float((folder / "mark").read_text())
    print(done.stderr[-8000:])
    job.nothing_left(folder, port=port)
    return done, seconds


def torchrun_outputs(folder: Path, start: int) -> list[str]:
    """What each rank printed, stdout and stderr, in one start under torchrun."""
    found = sorted((folder / "logs").rglob(f"attempt_{start}/*/stderr.log"), key=lambda path: int(path.parent.name))
    return [path.with_name("stdout.log").read_text() + path.read_text() for path in found]


# ------------------------------------------------------------------------------------------------- the grid
WHATS = {"kill": "`kill -9`", "_exit": "`os._exit(3)`", "stop": "`SIGSTOP`", "raise": "an exception", "exit": "`sys.exit(3)`"}
PLACES = {
    "warm-up": {"where": "forward", "call": 1, "microbatch": 0},
    "steady state": {"where": "forward", "call": 1, "microbatch": 5},
    "drain": {"where": "backward", "call": 1, "microbatch": MICROBATCHES - 1},
    "finalize": {"where": "finalize", "call": 1, "microbatch": 0},
    "evaluation": {"where": "forward", "call": 2, "microbatch": 3},
}
EVALUATE = ["--eval-interval", "1", "--eval-iters", "2"]  # calls: one of training, two of evaluation, ...


@dataclass(frozen=True)
class Cell:
    """One fault of the grid."""

    what: str
    place: str
    rank: int

    def __str__(self) -> str:
        return f"{self.what}-{self.place}-stage{self.rank}"

    @property
    def fault(self) -> dict:
        return {"rank": self.rank, "what": self.what} | PLACES[self.place]

    @property
    def call(self) -> str:
        """The call that others are in, as a pattern: evaluation has no backward that would keep them together."""
        return "[123]" if self.place == "evaluation" else "1"

    @property
    def code(self) -> int:
        """The exit status of the rank itself (a stopped one is killed by the test)."""
        return {"kill": -9, "stop": -9, "_exit": 3, "exit": 3, "raise": 1}[self.what]

    def verdict(self, pid: int | str) -> str:
        """What every other rank says of it, as a pattern."""
        if self.what in ("kill", "_exit"):
            neighbours = "|".join(f"{low}>{low + 1}, {low + 1}>{low}" for low in (self.rank - 1, self.rank) if 0 <= low < RANKS - 1)
            return rf"{{}} was lost \(({neighbours})\): rank {self.rank} \(process {pid}\) ended without saying goodbye"
        if self.what == "stop":
            return r"{} was lost \(heartbeat\): no sign of life for \d+ s: stopped, or its machine hangs"
        text = "ValueError: a fault on purpose" if self.what == "raise" else "SystemExit: 3"
        action = f"{self.rank}{'B' if self.place == 'drain' else 'F'}{PLACES[self.place]['microbatch']}"
        return rf"{{}} failed \({'outside the schedule' if self.place == 'finalize' else action}\): {text}"


def check(cell: Cell, ended: list[Ended]) -> None:
    """Word for word what every rank printed, and its exit status."""
    verdict = cell.verdict(ended[cell.rank].pid).format(re.escape(name(cell.rank)))
    for end in ended:
        if end.rank == cell.rank:
            assert end.code == cell.code and not end.said, end.said
            assert (cell.what == "raise") == bool(re.search(r"^(\[rank\d\]: )?ValueError: a fault on purpose$", end.output, re.M))
            assert "PipelineError" not in end.output
            continue
        me, action = re.escape(f"[rrfp] {name(end.rank)}"), r"\d[FB]\d"
        # A rank may hear of a fault in another's first action before it has entered that call itself.
        expected = [
            f"{me}: {verdict}",
            rf"{me} (in call {cell.call}|after call \d+|before its first call): running (nothing|{action}), last action (nothing yet|{action}, \d+\.\d+ s)",
            rf"{me}: report in \S+; this process ends within 15 s",
        ]
        assert end.code == 1
        assert len(end.said) == 3 and all(map(re.fullmatch, expected, end.said)), f"{end.said} is not {expected}"
        assert re.search(f"^{expected[0]}$", end.report, re.M)
        # Inside a call the same text is raised, too.
        raised = re.findall(r"^(?:\[rank\d\]: )?rrfp\.errors\.PipelineError: (.*)", end.output, re.M)
        assert all(re.fullmatch(verdict, text) for text in raised), raised
        assert end.seconds < 30


class Table:
    """Seconds from each fault to the end of every survivor, printed as the table of docs/failures.md."""

    def __init__(self):
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, what: str, place: str, seconds: list[float]) -> None:
        self._seconds[what, place] += seconds

    def __str__(self) -> str:
        places = list(dict.fromkeys(place for _, place in self._seconds))
        rows = [["fault", *places], ["---"] * (len(places) + 1)]
        for what in dict.fromkeys(what for what, _ in self._seconds):
            rows.append([WHATS.get(what, what), *(self._cell(self._seconds.get((what, place))) for place in places)])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    @staticmethod
    def _cell(seconds: list[float] | None) -> str:
        return f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})" if seconds else "–"
