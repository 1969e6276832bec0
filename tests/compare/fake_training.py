"""Stands for a training in tests of `rrfp compare-training`: logs as Megatron does, and records the calls of two pipeline stages.

    python fake_training.py [--fault FAULT:WORD] [--replicas N] [flags that a comparison adds]

FAULT applies where one of the flags is WORD: differ (another loss in iteration 2), fail, hang, short (fewer iterations), leave (a process
that outlives it and holds its output).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from rrfp.action import Action
from rrfp.trace.recorder import Recorder


def value(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    fault, _, word = value("--fault", ":-").partition(":")
    fault = fault if word in sys.argv else ""
    iterations, trace, replicas = int(value("--exit-interval")), Path(value("--rrfp-trace")), int(value("--replicas", "1"))
    if fault == "fail":
        print("rrfp: --rrfp-limit 1: deliberate", flush=True)
        sys.exit(2)
    if fault == "leave":
        Path(os.environ["FAKE_PID"]).write_text(str(subprocess.Popen(["sleep", "300"], start_new_session=True).pid))
    # The later replica is the slower one, and holds more.
    folders = [trace] if replicas == 1 else [trace / f"pipeline{replica}" for replica in range(replicas)]
    recorders = [[Recorder(rank=rank, stages=(rank,), directory=folder, ranks=2) for rank in range(2)] for folder in folders]
    fast = "ready" in sys.argv
    for iteration in range(1, iterations + 1 - (fault == "short")):
        if fault == "hang" and iteration == 2:
            time.sleep(600)
        for replica, pair in enumerate(recorders):
            for rank, recorder in enumerate(pair):
                begin = 10.0 * iteration
                recorder.begin_call(iteration, microbatches=1, forward_only=False, now=begin)
                length = (1.0 if fast else 2.0) * (1 + replica)
                recorder.action(Action("F", rank, 0), begin, begin + length / 4, 1 + replica, 0.1)
                recorder.waited("B", begin + length / 4, begin + length / 2)
                recorder.action(Action("B", rank, 0), begin + length / 2, begin + length, 1, 0.0)
                recorder.end_call(begin + length)
        loss = 5.0 - iteration / 10 + (1e-6 if fault == "differ" and iteration == 2 else 0)
        print(f" [2026-01-01 00:00:00] iteration {iteration:8d}/ {iterations + 5:8d} | consumed samples: {iteration} | "
              f"elapsed time per iteration (ms): {1100.0 if fast else 2200.0 + iteration} | "
              f"throughput per GPU (TFLOP/s/GPU): {time.time() % 1:.3f} | "
              f"lm loss: {loss:.6E} | grad norm: 1.25 |", flush=True)
    print("[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 2048.00 |")
    for pair in recorders:
        for recorder in pair:
            recorder.close()


if __name__ == "__main__":
    main()
