"""The check behind scripts/gpu_check.sh: starts the ranks part by part, each with a deadline, and makes one table of what they found."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUDGET = 455.0
"""Seconds for everything, doctor included, but for ending what is late (GRACE); scripts/gpu_check.sh ends it at 480."""
DOCTOR, GRACE, LEAST = 60.0, 10.0, 20.0
"""Seconds: for `rrfp doctor`; for killed processes to end; without which no part is begun."""
PARTS = (
    # name, most seconds, needs so many GPUs, what it shows
    ("memory", 60, 1, "copies, events and memory between two processes"),
    ("parity", 150, 1, "losses, gradients and weights bitwise those of Megatron's 1F1B, and near those of one stage"),
    ("nccl", 90, 2, "the same through NCCL (experimental)"),
    ("delays", 120, 1, "random delays on the device, iteration after iteration: weights bitwise those without"),
    ("time", 120, 1, "an iteration without jitter takes at most 1.02 x Megatron's 1F1B"),
    ("agreement", 60, 1, "what a decision costs among ranks that agree"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="processes; default: one per GPU, four at most, two on one GPU")
    parser.add_argument("--iterations", type=int, default=500, help="of the part `delays` (%(default)s)")
    names = [name for name, *_ in PARTS]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="logs, results and the trace (%(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a fake GPU")
    options = parser.parse_args()
    gpus = 0 if options.rehearse else count_gpus()
    if not gpus and not options.rehearse:
        print(f"gpu_check: the torch of {sys.executable} can use no GPU here: run it where there is one, with --python an interpreter whose torch "
              "is built for CUDA, or --rehearse", file=sys.stderr)
        return 2
    ranks = options.ranks or (min(4, gpus) if gpus > 1 else 2)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_check: ended from outside; what had run stands above"))
    until, table = time.monotonic() + BUDGET, []
    try:
        subprocess.run([sys.executable, "-m", "rrfp", "doctor"], timeout=DOCTOR, check=False)
    except subprocess.TimeoutExpired:
        print(f"rrfp doctor did not end within {DOCTOR:.0f} s", file=sys.stderr)
    for name, seconds, needs, shows in PARTS:
        left = until - time.monotonic()
        if options.only and name not in options.only:
            continue
        if needs > max(gpus, 1):
            verdict, details = "not run", f"needs {needs} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"
        elif left < LEAST:
            verdict, details = "not run", "no time left"
        elif name == "agreement":
            verdict, details = run_agreement(options, ranks, deadline=min(seconds, left))
        else:
            verdict, details = run_part(options, name, ranks, gpus, deadline=min(seconds, left))
        table.append((name, verdict, shows, details))
        print(f"[{name}] {verdict}: {details}", flush=True)
        (options.out / "verdict.json").write_text(json.dumps(
            {"rehearsal": options.rehearse, "gpus": gpus, "ranks": ranks,
             "parts": [dict(zip(("part", "verdict", "shows", "details"), row, strict=True)) for row in table]},
            indent=1))
    print_table(table, options, gpus, ranks)
    return 0 if all(verdict in ("ok", "not run", "slower") for _, verdict, *_ in table) else 1


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_part(options, name: str, ranks: int, gpus: int, *, deadline: float) -> tuple[str, str]:
    """Start its ranks, wait for them, put their results together."""
    folder = options.out / name
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*"):
        if old.is_file():
            old.unlink()
    store = folder / "store"
    with nobody_left() as processes:
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1",
                "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # NCCL reads it once, before --rrfp-transport nccl could set it here
                "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}
            command = [sys.executable, str(HERE / "gpu_check_rank.py"), name, str(folder), str(store), str(gpus), str(options.iterations)]
            log = open(folder / f"rank{rank}.log", "wb")
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
            log.close()
        late = wait_for(processes, deadline)
    results = {}
    for rank in range(ranks):
        path = folder / f"rank{rank}.json"
        results[rank] = json.loads(path.read_text()) if path.exists() else None
    failed = [rank for rank, result in results.items() if result is None or not result["ok"]]
    if late:
        return "FAILED", f"ranks {late} did not end within {deadline:.0f} s; see {folder}"
    if failed:
        why = (results[failed[0]] or {}).get("details") or last_line(folder / f"rank{failed[0]}.log")
        return "FAILED", f"rank {failed[0]}: {why}; see {folder}"
    return results[0].get("verdict", "ok"), "; ".join(dict.fromkeys(result["details"] for result in results.values() if result["details"]))


@contextlib.contextmanager
def nobody_left() -> Iterator[list[subprocess.Popen]]:
    """A list of leaders of process groups: whatever of them runs at the end is killed, however it comes."""
    processes = []
    try:
        yield processes
    finally:
        left = [process for process in processes if process.poll() is None]
        for process in left:
            os.killpg(process.pid, signal.SIGKILL)
        until = time.monotonic() + GRACE
        for process in left:
            process.wait(max(0.1, until - time.monotonic()))


def wait_for(processes: list[subprocess.Popen], deadline: float) -> list[int]:
    """The places of those that did not end within `deadline` seconds."""
    until, late = time.monotonic() + deadline, []
    for place, process in enumerate(processes):
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(place)
    return late


def run_agreement(options, ranks: int, *, deadline: float) -> tuple[str, str]:
    """benchmarks/agreement.py, whose last lines are the figures."""
    command = [sys.executable, str(HERE.parent / "benchmarks/agreement.py"), "--members", str(ranks)]
    command += ["--decisions", "20" if options.rehearse else "100"]
    path = options.out / "agreement.log"
    with open(path, "wb") as log, nobody_left() as processes:
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        if wait_for(processes, deadline):
            return "FAILED", f"did not end within {deadline:.0f} s; see {path}"
    if processes[0].returncode:
        return "FAILED", f"{last_line(path)}; see {path}"
    return "ok", "\n".join(["microseconds, median and 99th percentile:", *path.read_text().strip().splitlines()])


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"


def print_table(table, options, gpus: int, ranks: int) -> None:
    where = "a fake GPU on the CPU: a rehearsal, which shows nothing of a real one" if options.rehearse else f"{gpus} GPU{'s' if gpus > 1 else ''}"
    print(f"\n{ranks} processes, {where}")
    for name, verdict, shows, details in table:
        print(f"{name:<10} {verdict:<8} {shows}\n{'':<20}{details}")
    print(f"logs, results and a trace: {options.out}")


if __name__ == "__main__":
    sys.exit(main())
