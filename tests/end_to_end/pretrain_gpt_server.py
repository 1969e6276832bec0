"""Starts training jobs of bare processes quickly: torch and Megatron are imported once, and every rank is a fork that runs on from there.

Nothing of RRFP but its CPU mode is loaded before the fork. A rank then goes one of two ways: "rrfp" enters `rrfp.cli.main` as
`python -m rrfp` does; "megatron" runs the script as it is, the baseline. A line on stdin is one job, {"way", "argv", "env": [one
per rank], "output": [one file per rank]}; a line on stdout is a list of process ids, or [process id, exit status].
"""

import json
import os
import runpy
import sys


def warm(script):
    """Import what every rank needs. No thread may be started here: forks would lack it."""
    from rrfp.megatron import cpu

    cpu.enable()
    sys.path[0] = os.path.dirname(script)
    cpu.patch_megatron()
    runpy.run_path(script, run_name="imported")
    import megatron.core.dist_checkpointing.strategies.torch
    import torch.distributed.checkpoint
    import torch.utils.cpp_extension  # noqa: F401

    assert not [name for name in sys.modules if name in ("rrfp.megatron.forward_backward", "rrfp.megatron.baseline", "rrfp.megatron.launcher")]
    assert len(os.listdir("/proc/self/task")) == 1


def serve():
    """Returns, in a rank's own process, the job that it is to run."""
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
                return job
            children.append(child)
        print(json.dumps(children), flush=True)
        while children:
            child, status = os.wait()
            children.remove(child)
            print(json.dumps([child, os.waitstatus_to_exitcode(status)]), flush=True)
    return None


def main(script):
    warm(script)
    job = serve()
    if job is None:
        return 0
    if job["way"] == "rrfp":
        from rrfp.cli import main as rrfp

        return rrfp(["--cpu", script, *job["argv"]])
    sys.argv = [script, *job["argv"]]
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
