"""Two pipelines of two ranks each, forked from one process that has imported torch: real runtimes, actions that sleep, one fault.

A line on stdin is one job, {"folder", "fault", "rank", "timeout", "ring", "calls"}; a line on stdout gives the exit statuses and the seconds from the
fault to each rank's end. What rank r prints is in folder/out<r>.txt.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

RANKS, PIPELINES = 4, [[0, 2], [1, 3]]
MICROBATCHES, SECONDS = 4, 0.01


class Sleeping:
    """Executes actions by sleeping. `fault(call, action)` is asked before each."""

    capacity, padded = 1, 0.0

    def __init__(self, release, fault):
        self._release, self._fault = release, fault

    def launch(self, task, inputs, done):
        import numpy as np

        from rrfp.comm.transport import Part

        self._fault(task.action)
        time.sleep(SECONDS)
        for arrival in inputs:
            self._release(arrival)
        done({edge: (Part("uint8", (8,), np.zeros(8, np.uint8)),) for edge in task.sends})


def strike(job):
    Path(job["folder"], "mark").write_text(repr(time.monotonic()))
    match job["fault"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("a fault on purpose")


def main(rank, job):
    import torch

    from rrfp.megatron import runtime as runtimes
    from rrfp.megatron.options import Options

    if not job["ring"]:
        runtimes.Replicas = lambda **_: None
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    options = Options(timeout=job["timeout"])
    own = next(group for ranks, group in [(r, torch.distributed.new_group(r)) for r in PIPELINES] if rank in ranks)
    runtime = runtimes.runtime_for(options, own)
    if runtime.replicas is not None:
        assert runtime.replicas.joined.wait(60)
    torch.distributed.barrier()
    for call in range(job["calls"]):
        scheduler = options.policy.scheduler(runtime.placement, runtime.rank, MICROBATCHES)

        def fault(action, call=call):
            if rank == job["rank"] and call == 1 and action.microbatch == 2:
                strike(job)

        runtime.engine.run(scheduler, Sleeping(runtime.transport.release, fault), microbatches=MICROBATCHES)


def child(rank, job):
    target = os.open(Path(job["folder"], f"out{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ["RRFP_REPORT_DIR"] = job["folder"]
    from rrfp.megatron import runtime

    code = 0
    try:
        main(rank, job)
    except BaseException as error:
        runtime.tell_all(error)
        traceback.print_exc()
        code = 1
    runtime.close_all()
    sys.stderr.flush()
    os._exit(code)  # destructors of process groups may wait for a dead peer, which is not what is timed here


def serve():
    """Runs the jobs of stdin. Returns a rank and its job in that rank's own process, None at the end."""
    from rrfp.comm.ports import reserve_port

    for line in sys.stdin:
        job = json.loads(line)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
        pids = []
        for rank in range(RANKS):
            if (pid := os.fork()) == 0:
                return rank, job
            pids.append(pid)
        ended = {}
        while len(ended) < RANKS:
            if job["fault"] == "stop" and len(ended) == RANKS - 1:
                os.kill(pids[job["rank"]], signal.SIGKILL)
            pid, status = os.wait()
            ended[pids.index(pid)] = os.waitstatus_to_exitcode(status), time.monotonic()
        mark = Path(job["folder"], "mark")
        start = float(mark.read_text()) if mark.exists() else time.monotonic()
        print(json.dumps([[code, at - start] for _, (code, at) in sorted(ended.items())]), flush=True)
    return None


if __name__ == "__main__":
    import megatron.core  # noqa: F401
    import torch  # noqa: F401

    import rrfp.megatron.runtime  # noqa: F401

    mine = serve()
    if mine is not None:
        child(*mine)
    sys.stdout.flush()
    os._exit(0)  # taking down what was imported takes seconds
