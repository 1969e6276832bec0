"""Megatron's first torch_dist checkpoint starts a helper process, a `multiprocessing.Manager`. It outlives a rank that is killed: end it."""

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.managers import SyncManager


def watch_helper() -> Callable[[], None]:
    """From now on the helper ends with its rank, however that ends. Returns what undoes it.

    Megatron's: `get_write_results_queue` in megatron/core/dist_checkpointing/strategies/filesystem_async.py.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async.get_write_results_queue

    @functools.wraps(original)
    def queue(mp_mode: str = "spawn"):
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(_end_with_parent)
            filesystem_async._results_queue = manager.Queue()  # keeps the manager
        return original(mp_mode)

    def undo():
        filesystem_async.get_write_results_queue = original

    filesystem_async.get_write_results_queue = queue
    return undo


def _end_with_parent() -> None:
    """In the helper."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, name="rrfp-parent", daemon=True).start()
