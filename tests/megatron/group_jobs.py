"""The script that a `Group`'s processes run: all jobs."""

import jobs  # first: it puts Megatron on the CPU before anything imports it

import contract_jobs  # noqa: F401
import device_jobs  # noqa: F401
import memory_jobs  # noqa: F401
import numeric_jobs  # noqa: F401

if __name__ == "__main__":
    jobs.main()
