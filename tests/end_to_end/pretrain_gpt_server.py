"""Starts training jobs of bare processes quickly: Megatron is imported once, and every rank is a fork that runs on from there.

Nothing of RRFP but its CPU mode is loaded before the fork. A rank then goes one of two ways: "rrfp" enters `rrfp.cli.main` as
`python -m rrfp` does; "megatron" runs the script as it is, the baseline. A line on stdin is one job, {"way", "argv", "env": [one
per rank], "output": [one file per rank]}; a line on stdout is a list of process ids, or [process id, exit status].
"""

import json
import multiprocessing.spawn
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
    import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401
    import torch.distributed.checkpoint
    import torch.utils.cpp_extension  # noqa: F401

    assert not sys.modules.keys() & {"rrfp.megatron.forward_backward", "rrfp.megatron.baseline", "rrfp.megatron.launcher"}
    assert len(os.listdir("/proc/self/task")) == 1


def spawn_quickly():
    """A spawned helper (a rank's first checkpoint starts one) need not import the training script, and all of Megatron, again."""
    prepare = multiprocessing.spawn.get_preparation_data

    def without_script(name):
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    multiprocessing.spawn.get_preparation_data = without_script


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
                sys.stdout.reconfigure(line_buffering=True)  # whole lines, among those of stderr
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
    spawn_quickly()
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
