"""A long engine-only job on real processes: python -m benchmarks.soak --layout pp [--iterations 10000] [--seed N]

Engine, scheduler, transport and agreement as in training; stages that sleep. An iteration is a training call, now and then an
evaluation, with random microbatches, policy, durations, message sizes and delays. Every message's bytes are checked when its
action starts and, as autograd would read them, when its backward ends. What the processes hold is read from outside, from /proc,
while all are idle between two blocks of iterations. Exit status 1 with one line if anything grows, or a rank fails.

`--layout eight --starts N` starts a job N times for one iteration instead, while `--burners` processes burn the cores.
"""

import argparse
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.soak_job import LAYOUTS, Block, Layout, Worker
from rrfp.compare.group import Group

BLOCKS = 40
"""Of iterations; after each, every process is looked at."""
LEAST = 200
"""Iterations of a run: its first quarter has to be warm-up enough."""
CALL_TIMEOUT = 60.0
"""Seconds without progress that end a call."""
LONGEST_ITERATION = 0.5
"""Seconds on average; what is patient with a block of them counts on that."""


# ---------------------------------------------------------------------- what it holds
@dataclass(frozen=True)
class Quantity:
    """Something that a process holds. More by at most `tolerance` is no growth; `unit` is what it is printed in."""

    name: str
    tolerance: int
    unit: int = 1

    def text(self, value: float) -> str:
        return f"{value / self.unit:.0f}{' kB' if self.unit == 1024 else ''}"


# How many buffers are in use at once is bounded, but by chance: the peak can come late, a few more than before it. Each is a file
# of at most 64 kB, mapped once at each end, and a mapping keeps a descriptor of its own. A new thread cannot come by chance.
# Memory is full of holes, which fill slowly: the tolerance is one of the allocator's steps. An object more or less is a cache's.
QUANTITIES = (
    Quantity("descriptors", 12),
    Quantity("threads", 0),
    Quantity("memory files", 6),
    Quantity("their bytes", 7 << 16, 1024),
    Quantity("mappings of them", 6),
    Quantity("/dev/shm", 0),
    Quantity("anonymous memory", 1 << 18, 1024),
    Quantity("objects", 1000),
)


def held(pid: int) -> dict[str, int]:
    """What a process holds, as /proc tells: numbers and bytes by the names of `QUANTITIES`."""
    process = Path(f"/proc/{pid}")
    files = [(link, os.readlink(link)) for link in (process / "fd").iterdir()]
    memory = [os.stat(link) for link, target in files if target.startswith("/memfd:")]
    sizes = {file.st_ino: file.st_size for file in memory}
    maps = (process / "maps").read_text().splitlines()
    rollup = dict(re.findall(r"^(\w+): +(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE))
    return {
        "descriptors": len(files),
        "threads": len(list((process / "task").iterdir())),
        "memory files": len(sizes),
        "their bytes": sum(sizes.values()),
        "mappings of them": sum("/memfd:" in line for line in maps),
        "/dev/shm": len({line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
                        | {target for _, target in files if target.startswith("/dev/shm/")}),
        "anonymous memory": 1024 * int(rollup["Anonymous"]),
    }


def growth(series: Sequence[float]) -> float:
    """How much more there is in the last quarter than in the second; the first is warm-up.

    The smaller of two estimates, so that neither a late step nor a single peak counts for more than it is: the medians'
    difference, and what the least-squares line rises from the middle of the one to the middle of the other.
    """
    quarter = len(series) // 4
    rise = statistics.median(series[-quarter:]) - statistics.median(series[quarter : 2 * quarter])
    steady = series[quarter:]
    return min(rise, statistics.linear_regression(range(len(steady)), steady).slope * (len(series) - 2 * quarter))


@dataclass(frozen=True)
class Soak:
    """What was seen: per block and process what it held, per process most in flight, and what was left behind after closing."""

    samples: list[list[dict[str, int]]]
    messages: int
    seconds: float
    peaks: list[int]
    left_behind: list[str]

    def series(self, process: int, name: str) -> list[int]:
        return [sample[process][name] for sample in self.samples]

    @property
    def processes(self) -> range:
        return range(len(self.samples[0]))

    def wrong(self) -> list[str]:
        """One phrase for everything that grew beyond its tolerance, or was left behind."""
        grown = [f"process {process}: {quantity.name} grew by {quantity.text(more)}, {quantity.text(quantity.tolerance)} allowed"
                for quantity in QUANTITIES for process in self.processes
                if (more := growth(self.series(process, quantity.name))) > quantity.tolerance]
        return grown + [f"{what} left behind" for what in self.left_behind]

    def table(self) -> list[str]:
        """Per quantity: least and most of any process after the first quarter, and the largest growth of any."""
        lines = [f"{'':18} {'least':>11} {'most':>11} {'grew by':>9} {'allowed':>9}"]
        for quantity in QUANTITIES:
            all_series = [self.series(process, quantity.name) for process in self.processes]
            steady = [value for series in all_series for value in series[len(series) // 4 :]]
            columns = (min(steady), max(steady), max(map(growth, all_series)), quantity.tolerance)
            least, most, more, allowed = map(quantity.text, columns)
            lines.append(f"{quantity.name:18} {least:>11} {most:>11} {more:>9} {allowed:>9}")
        return lines


# ---------------------------------------------------------------------- running it
def soak(layout: Layout, *, iterations: int, seed: int, leak: Callable[[int, list], None] | None = None,
         say: Callable[[str], None] = lambda line: None) -> Soak:
    """Run it to its end; at least `LEAST` iterations. Raises RuntimeError if a rank fails.

    leak: leak(process, kept) is called after every iteration, for controls; `kept` is a list that lasts.
    """
    group = Group(layout.workers, stage=partial(Worker, layout=layout, seed=seed, leak=leak), call_timeout=CALL_TIMEOUT)
    samples, peaks, start = [], [0] * layout.workers, time.monotonic()
    with group:
        for block in range(BLOCKS):
            first, last = iterations * block // BLOCKS, iterations * (block + 1) // BLOCKS
            outcome = group.run(Block(first, last), lasts=LONGEST_ITERATION * (last - first))
            samples.append([held(pid) | counted for pid, counted in zip(group.pids, outcome.parts, strict=True)])
            peaks = list(map(max, peaks, outcome.peaks))
            passed = time.monotonic() - start
            if block % 4 == 3:
                say(f"{last} of {iterations} iterations, {passed:.0f} s, about {passed * (iterations - last) / last:.0f} s to go")
    messages = sum(process["messages"] for process in samples[-1])
    return Soak(samples, messages, time.monotonic() - start, peaks, group.left_behind)


@contextmanager
def burning(processes: int) -> Iterator[None]:
    """So many processes use all the processor time that they get."""
    context = multiprocessing.get_context("fork")
    burners = [context.Process(target=_burn, args=(os.getpid(),), daemon=True) for _ in range(processes)]
    try:
        for burner in burners:
            burner.start()
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join(10.0)
            burner.close()


def _burn(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(100_000))


def start_often(layout: Layout, *, starts: int, burners: int, seed: int, deadline: float = 60.0,
                say: Callable[[str], None] = lambda line: None) -> list[float]:
    """Start the job, run an iteration, close it, again and again, on cores that others burn. Seconds of each start.

    deadline: seconds for a start.
    Raises RuntimeError naming the rank if a start fails or leaves something behind.
    """
    seconds = []
    with burning(burners):
        for number in range(starts):
            begin = time.monotonic()
            group = Group(layout.workers, stage=partial(Worker, layout=layout, seed=seed + number), start_deadline=deadline,
                          call_timeout=CALL_TIMEOUT)
            seconds.append(time.monotonic() - begin)
            with group:
                group.run(Block(0, 1))
            if group.left_behind:
                raise RuntimeError(f"start {number + 1} left behind: {'; '.join(group.left_behind)}")
            say(f"start {number + 1} of {starts}: {seconds[-1]:.2f} s")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="pp")
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=0, help="start so often instead, for one iteration each")
    parser.add_argument("--burners", type=int, default=8, help="with --starts: processes that burn the cores meanwhile")
    options = parser.parse_args()
    if options.iterations < LEAST:
        parser.error(f"--iterations {options.iterations}: at least {LEAST}, so that its first quarter warms up")
    layout = LAYOUTS[options.layout]
    print(f"{options.layout}: {layout.ranks} ranks x {layout.chunks} chunks x {layout.members} members ({layout.agreement}), "
          f"{layout.workers} processes, seed {options.seed}; {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}",
          flush=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        if options.starts:
            times = start_often(layout, starts=options.starts, burners=options.burners, seed=options.seed, say=say)
            print(f"{len(times)} starts while {options.burners} processes burn the cores: none failed; "
                  f"median {statistics.median(times):.2f} s, longest {max(times):.2f} s")
            return 0
        result = soak(layout, iterations=options.iterations, seed=options.seed, say=say)
    except RuntimeError as error:
        print(f"failed: {error}")
        return 1
    print(f"{options.iterations} iterations in {result.seconds:.0f} s ({1e3 * result.seconds / options.iterations:.1f} ms each), "
          f"{result.messages} messages, each one's bytes checked twice; most in flight {' '.join(map(str, result.peaks))}")
    print("\n".join(result.table()))
    if wrong := result.wrong():
        print(f"failed: {'; '.join(wrong)}")
        return 1
    print("nothing grew, nothing was left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
