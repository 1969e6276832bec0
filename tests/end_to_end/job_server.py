"""Starts training jobs of bare processes quickly: Megatron is imported once, and every rank is a fork that runs on from there.

Nothing of RRFP but its CPU mode is loaded before the fork, unless it is told `--touched`: then all that training loads is. A rank then goes one of two ways: "rrfp" enters `rrfp.cli.main` as
`python -m rrfp` does; "megatron" runs the script as it is, the baseline. Jobs may run side by side. A line on stdin is one job,
{"job": its number, "way", "argv", "env": [one per rank], "output": [one file per rank]}; a line on stdout is {"job", "pids"}, or
{"job", "rank", "code", "when": time.monotonic()} when a rank has ended.
"""

import contextlib
import gc
import json
import multiprocessing.spawn
import os
import runpy
import select
import sys
import time


def warm(script, *, touched):
    """Import what every rank needs. No thread may be started here: forks would lack it."""
    from rrfp.megatron import cpu

    cpu.enable()
    sys.path[0] = os.path.dirname(script)
    cpu.patch_megatron()
    runpy.run_path(script, run_name="imported")
    import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401
    import megatron.core.models.gpt  # noqa: F401
    import megatron.core.tokenizers.text.libraries.null_tokenizer
    import torch._dynamo  # what follows is imported by the first optimizer, checkpoint or custom operator of a process
    import torch._inductor.test_operators
    import torch.distributed.checkpoint
    import torch.onnx
    import torch.utils.cpp_extension  # noqa: F401
    import zmq  # noqa: F401

    with contextlib.suppress(ImportError):  # not in every release
        import megatron.core.models.mimo  # noqa: F401
    if touched:
        import rrfp.cli
        import rrfp.megatron.forward_backward
        import rrfp.megatron.launcher
        import rrfp.report.hang  # noqa: F401
    assert touched or not sys.modules.keys() & {"rrfp.megatron.forward_backward", "rrfp.megatron.baseline", "rrfp.megatron.launcher"}
    assert len(os.listdir("/proc/self/task")) == 1


def parse_quickly():
    """Megatron reads the help of its arguments from its own source code, half a second in every rank: do without the help."""
    from megatron.training import argument_utils

    factory = getattr(argument_utils, "ArgumentGroupFactory", None)  # since 0.18
    if factory is not None:
        factory._get_field_docstrings = lambda self, source: {}


def spawn_quickly():
    """A spawned helper (a rank's first checkpoint starts one) need not import the training script, and all of Megatron, again."""
    prepare = multiprocessing.spawn.get_preparation_data

    def without_script(name):
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    multiprocessing.spawn.get_preparation_data = without_script


def become(job, rank, descriptors):
    """In the fork: this rank's environment and output."""
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.update(job["env"][rank])
    if (name := os.environ.pop("NETNS", None)) is not None:  # another host, as far as the network goes
        with open(f"/run/netns/{name}") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        say_addresses()
    target = os.open(job["output"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # whole lines, among those of stderr


def say_addresses():
    """Every address at which a socket of RRFP listens goes into the output."""
    import zmq

    bind = zmq.Socket.bind

    def said(self, address):
        result = bind(self, address)
        print("listening:", self.last_endpoint.decode(), flush=True)
        return result

    zmq.Socket.bind = said


def serve():
    """Returns, in a rank's own process, the job that it is to run; in the server None, when stdin has ended."""
    jobs = open(0, "rb", buffering=0, closefd=False)  # unbuffered: what `poll` doesn't see is not waiting here either
    poller, running = select.poll(), {}
    poller.register(0, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor:
                number, rank, pid = running.pop(descriptor)
                poller.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                print(json.dumps({"job": number, "rank": rank, "code": os.waitstatus_to_exitcode(status), "when": time.monotonic()}), flush=True)
                continue
            if not (line := jobs.readline()):
                return None
            job, pids = json.loads(line), []
            for rank in range(len(job["env"])):
                if (pid := os.fork()) == 0:
                    become(job, rank, running)
                    return job
                descriptor = os.pidfd_open(pid)
                running[descriptor] = job["job"], rank, pid
                poller.register(descriptor, select.POLLIN)
                pids.append(pid)
            print(json.dumps({"job": job["job"], "pids": pids}), flush=True)


def main(script, *options):
    warm(script, touched="--touched" in options)
    parse_quickly()
    spawn_quickly()
    gc.freeze()  # a fork's garbage collections would touch, and so copy, every page
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
    sys.exit(main(*sys.argv[1:]))
