"""The check behind scripts/gpu_check.sh: starts the ranks part by part, each with a deadline, and makes one table of what they found."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUDGET = 465.0
"""Seconds for everything; scripts/gpu_check.sh ends it at 480."""
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
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help=f"of {', '.join(name for name, *_ in PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="logs, results and the trace (%(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a fake GPU")
    options = parser.parse_args()
    gpus = 0 if options.rehearse else count_gpus()
    if not gpus and not options.rehearse:
        print("this machine has no GPU that torch can use: run it where there is one, or --rehearse", file=sys.stderr)
        return 2
    ranks = options.ranks or (min(4, gpus) if gpus > 1 else 2)
    options.out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "rrfp", "doctor"], timeout=60, check=False)
    started, table = time.monotonic(), []
    for name, seconds, needs, shows in PARTS:
        left = BUDGET - (time.monotonic() - started)
        if options.only and name not in options.only:
            continue
        if needs > max(gpus, 1):
            verdict, details = "not run", f"needs {needs} GPUs, there is {gpus}"
        elif left < 20:
            verdict, details = "not run", "no time left"
        elif name == "agreement":
            verdict, details = run_agreement(options, ranks, deadline=min(seconds, left))
        else:
            verdict, details = run_part(options, name, ranks, gpus, deadline=min(seconds, left))
        table.append((name, verdict, shows, details))
        print(f"[{name}] {verdict}: {details}", flush=True)
    print_table(table, options, gpus, ranks)
    (options.out / "verdict.json").write_text(json.dumps(
        {"rehearsal": options.rehearse, "gpus": gpus, "ranks": ranks,
         "parts": [dict(zip(("part", "verdict", "shows", "details"), row, strict=True)) for row in table]},
        indent=1))
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
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}
        command = [sys.executable, str(HERE / "gpu_check_rank.py"), name, str(folder), str(store), str(gpus), str(options.iterations)]
        log = open(folder / f"rank{rank}.log", "wb")
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        log.close()
    until, late = time.monotonic() + deadline, []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        os.killpg(processes[rank].pid, signal.SIGKILL)
        processes[rank].wait(10)
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


def run_agreement(options, ranks: int, *, deadline: float) -> tuple[str, str]:
    """benchmarks/agreement.py, whose last lines are the figures."""
    command = [sys.executable, str(HERE.parent / "benchmarks/agreement.py"), "--members", str(ranks)]
    command += ["--decisions", "20" if options.rehearse else "100"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return "FAILED", str(error).splitlines()[0]
    return "ok", "\n".join(["microseconds, median and 99th percentile:", *done.stdout.strip().splitlines()])


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
