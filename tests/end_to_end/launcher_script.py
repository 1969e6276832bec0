"""A training script that only parses Megatron's arguments, and says whose schedule would run and how often it has the flags."""

import argparse
import json
import sys

from megatron.core.pipeline_parallel import schedules
from megatron.training import arguments

if __name__ == "__main__":
    before = [schedules.forward_backward_pipelining_without_interleaving, schedules.forward_step, schedules.backward_step]
    args = arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    after = [schedules.forward_backward_pipelining_without_interleaving, schedules.forward_step, schedules.backward_step]
    again = arguments.add_megatron_arguments(argparse.ArgumentParser())
    print(
        json.dumps(
            {
                "same": [a is b for a, b in zip(before, after, strict=True)],
                "module": after[0].__code__.co_filename.split("/")[-2:],
                "groups": sum(group.title.startswith("readiness") for group in again._action_groups),
                "argv": sys.argv[0],
                "limit": args.rrfp_limit,
            }
        )
    )
