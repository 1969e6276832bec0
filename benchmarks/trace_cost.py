"""What tracing costs per action: python benchmarks/trace_cost.py [--actions N]

Records calls as the engine does (per action: one wait, one arrival, one send), with and without a directory, and prints
microseconds per action, the time to end a call (breakdown, file) included, and that as a share of a 20 ms action.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rrfp.action import Action, Edge
from rrfp.trace.recorder import Recorder

ACTION = 0.020
"""Seconds: the action against which the cost is put."""


def cost(directory: Path | None, actions: int) -> tuple[float, float]:
    """Seconds per action: (while the call runs, at its end)."""
    recorder = Recorder(rank=0, stages=[0], directory=directory)
    work = [Action("FB"[index % 2], 0, index // 2) for index in range(actions)]
    edge, now = Edge(0, 1), 0.0
    recorder.begin_call(1, microbatches=actions // 2, forward_only=False, now=now)
    start = time.perf_counter()
    for index, action in enumerate(work):
        recorder.arrival(edge, index, now)
        recorder.waited("F", now, now + 0.001)
        recorder.start_action(action)
        recorder.action(action, now + 0.001, now + 0.021, 4)
        recorder.sent(edge, index, now + 0.021)
        now += 0.021
    middle = time.perf_counter()
    recorder.end_call(now)
    end = time.perf_counter()
    return (middle - start) / actions, (end - middle) / actions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actions", type=int, default=256, help="actions per call")
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    print(f"{'directory':>9}  {'in the call':>12}  {'at its end':>12}  {'together':>12}  share of a {ACTION * 1e3:.0f} ms action")
    with tempfile.TemporaryDirectory() as folder:
        for name, directory in (("no", None), ("yes", Path(folder))):
            samples = [cost(directory, options.actions) for _ in range(options.calls)]
            during, after = (statistics.median(column) for column in zip(*samples))
            cells = [f"{seconds * 1e6:9.2f} us" for seconds in (during, after, during + after)]
            print(f"{name:>9}  {cells[0]:>12}  {cells[1]:>12}  {cells[2]:>12}  {100 * (during + after) / ACTION:.3f}%")


if __name__ == "__main__":
    main()
