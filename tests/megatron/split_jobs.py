"""The script that a `Group`'s processes run for tests of the split backward: all its jobs."""

import jobs  # first: it puts Megatron on the CPU before anything imports it

import device_jobs  # noqa: F401
import layer_jobs  # noqa: F401
import step_jobs  # noqa: F401

if __name__ == "__main__":
    jobs.main()
