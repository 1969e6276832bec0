"""Where a rank writes what it knows when the job fails, so that one report comes of it."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rrfp.report import failures


def name_run(store) -> str:
    """The name of this run: date, time, and six random digits. Whoever asks first makes it, all others get the same.

    store: a part of the job's store that no earlier run has used.
    """
    mine = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return store.compare_set("run", "", mine).decode()


class FailureReport:
    """What this rank adds to the report of its job.

    Args:
        run: the same on all ranks of the job, other for each start of it.
        directory: where the report goes unless $RRFP_REPORT_DIR says otherwise; None: the working directory.
        world: ranks of the job.
        pipeline: those of this pipeline, in pipeline order.
        names: how errors call these.
        rank: this process' place among them.
    """

    def __init__(self, *, run: str, directory: str | None, world: int, pipeline: Sequence[int], names: Sequence[str], rank: int):
        self._directory = directory
        self._identity = {
            "run": run, "world": world, "pipeline": list(pipeline), "names": list(names), "rank": rank, "global_rank": pipeline[rank],
            "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip

    def write(self, text: str, view: dict) -> str | None:
        """Write and merge; returns the path of the merged report, None if nothing could be written.

        Under torchrun the agent ends the survivors as soon as one rank is gone, and what they print may be lost: the files stay.
        """
        failed = []
        for folder in dict.fromkeys([os.environ.get("RRFP_REPORT_DIR") or self._directory or ".", "."]):
            try:
                return str(failures.write(view | self._identity, text, directory=Path(folder)))
            except OSError as error:
                failed.append(str(error))
        print(f"[rrfp] rank {self._identity['global_rank']}: could not write a failure report: {'; '.join(failed)}", file=sys.stderr, flush=True)
        return None
