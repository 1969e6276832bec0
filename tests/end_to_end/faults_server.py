"""Starts jobs of bare processes quickly: it imports torch and Megatron once, and every rank is a fork that runs on from there.

Each rank enters by the same `rrfp.cli.main` as `python -m rrfp`. A line on stdin is one job, {"argv", "env": [one per rank],
"output": [one file per rank]}; a line on stdout is a list of process ids, or [process id, exit status, time.monotonic()].
"""

import json
import os
import sys
import time


def warm(script):
    """Import what every rank needs. No thread may be started here: forks would lack it."""
    from rrfp.megatron import launcher

    launcher._prepare(script, cpu=True)
    import megatron.core.models.gpt  # noqa: F401
    import megatron.training  # noqa: F401

    import rrfp.megatron.forward_backward  # noqa: F401
    assert len(os.listdir("/proc/self/task")) == 1


def serve():
    """Returns, in a rank's own process, the arguments that it is to run with."""
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        for env, output in zip(job["env"], job["output"], strict=True):
            child = os.fork()
            if child == 0:
                os.environ.update(env)
                target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(target, 1)
                os.dup2(target, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                return job["argv"]
            children.append(child)
        print(json.dumps(children), flush=True)
        while children:
            child, status = os.wait()
            children.remove(child)
            print(json.dumps([child, os.waitstatus_to_exitcode(status), time.monotonic()]), flush=True)
    return None


if __name__ == "__main__":
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    warm(sys.argv[1])
    arguments = serve()
    if arguments is not None:
        from rrfp.cli import main

        sys.exit(main(arguments))
