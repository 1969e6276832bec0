"""Runs a command of Python on several ranks, each a fork of this process: Megatron is imported, and a checkout compiled, once for all.

    megatron_suite_ranks.py FOLDER RANKS -m MODULE|SCRIPT ARGUMENTS...

A rank's output goes to FOLDER/out<rank>.txt. Prints the exit statuses as a JSON list.
"""

import json
import os
import runpy
import sys

from rrfp.megatron import cpu

cpu.enable()
cpu.patch_megatron()

import megatron.core.models.gpt  # noqa: E402, F401


def become(rank: int, folder: str) -> None:
    """In the fork: this rank's environment and output."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MEGATRON_SUITE": f"{folder}/seen{rank}.json"}
    target = os.open(f"{folder}/out{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)


def main(folder: str, ranks: str, *command: str) -> None:
    pids = []
    for rank in range(int(ranks)):
        if (pid := os.fork()) == 0:
            become(rank, folder)
            if command[0] == "-m":
                sys.argv = list(command[1:])
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(command)
                runpy.run_path(command[0], run_name="__main__")
            return
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main(*sys.argv[1:])
