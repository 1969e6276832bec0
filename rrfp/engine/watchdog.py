"""The watcher: one thread per process, from the moment the pipeline is connected to its closing.

It sees what the rank loop cannot: a peer lost while this rank is in the optimizer, a checkpoint or a data loader, a peer that is
stopped, and an action of this rank that never returns. It reads; it changes nothing of the engine's. On a failure it says so at
once, on this rank, naming who failed, writes a report, and makes sure that the process ends: a rank that waits in a collective
for a dead peer would wait for ever. Only closing the pipeline (`rrfp.uninstall()`) keeps a process alive after a failure.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Mapping

from rrfp.comm.transport import Failure
from rrfp.engine.failure import ELSEWHERE, FailureLatch, describe, is_hearsay
from rrfp.engine.loop import Engine

TICK = 1.0
"""Seconds between two looks; a twentieth of the timeout where that is less, so that a look comes in what CULPRIT_SHARE leaves."""
GRACE = 15.0
"""Seconds between a failure and the end of the process."""
CULPRIT_SHARE = 0.8
"""Share of the timeout that one action, or a peer's silence, may take. Below 1, so that the rank that is stuck, or its neighbour,
speaks before those that merely wait for it."""


class Watcher:
    """Watches one engine.

    Args:
        engine: whose latch and progress to watch.
        departed: ranks that have said goodbye; their silence means nothing.
        report: writes a report somewhere that outlives the process; called once, with the text and this rank's view, from the
            watcher's thread. Returns where it is, or None.
        abort: tells a failure to whoever does not hear it from the engine's transport. Called once, at once.
        silences: ranks of other pipelines to watch, by name: seconds since each one's last sign of life.
        grace: seconds after a failure until the process is ended.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        departed: Container[int],
        report: Callable[[str, dict], str | None],
        abort: Callable[[Failure], None] = lambda failure: None,
        silences: Callable[[], Mapping[str, float]] = dict,
        grace: float = GRACE,
    ):
        self._engine = engine
        self._name = engine.latch.name
        self._departed = departed
        self._report = report
        self._abort = abort
        self._silences = silences
        self._grace = grace
        self._stop = threading.Event()
        self._details = ""
        self._armed = False
        self.told = threading.Event()
        """Everything that there is to say has been said."""
        self._thread = threading.Thread(target=self._watch, name="rrfp-watcher", daemon=True)
        self._thread.start()

    def close(self, *, exiting: bool, deadline: float = 5.0) -> None:
        """Stop and join the thread, which first tells of a failure that it has just learned of. Only in the process that made it.

        exiting: the interpreter is shutting down. After a failure the end of the process then stays enforced, because destructors
            of process groups may wait for a dead peer.
        """
        self._stop.set()
        self._engine.latch.set_event.set()
        self._thread.join(deadline)
        if self._armed and not exiting:
            faulthandler.cancel_dump_traceback_later()
            self._armed = False

    # ------------------------------------------------------------------ the thread
    def _watch(self) -> None:
        latch = self._engine.latch
        self._resumed = last = time.monotonic()
        tick = min(TICK, self._engine.timeout / 20)
        while not latch.set_event.wait(tick):
            now = time.monotonic()
            # A long tick means that this process itself was stopped: what it knows of the others is old, and counts from now on.
            if now - last >= 3 * TICK:
                self._resumed = now
            self._look(now)
            last = now
        if latch.failure is not None:
            self._arm()
            self._abort(latch.failure)
            self._tell(latch)
        self.told.set()

    def _look(self, now: float) -> None:
        """The loop's own deadline covers its waits. Here: an action that does not return, and peers that are silent."""
        engine = self._engine
        limit = CULPRIT_SHARE * (engine.patience if engine.in_call else 3 * engine.timeout)
        awake = now - self._resumed
        running, idle = engine.running, min(awake, now - engine.last_progress)
        if engine.in_call and running is not None and idle > limit:
            self._fail(Failure(engine.rank, str(running), f"{running} has been running for {idle:.0f} s and does not return"))
            return
        # Heartbeats come from a thread of that process: whatever its main thread computes, they go on.
        silent = "no sign of life for {:.0f} s: stopped, or its machine hangs".format
        for rank, silence in engine.transport.state()["peers"].items():
            if (silence := min(awake, silence)) > limit and rank not in self._departed:
                self._fail(Failure(rank, "heartbeat", silent(silence), lost=True))
                return
        for name, silence in self._silences().items():
            if (silence := min(awake, silence)) > limit:
                self._fail(Failure(engine.rank, ELSEWHERE, f"{name} was lost (heartbeat): {silent(silence)}"))
                return

    def _fail(self, failure: Failure) -> None:
        engine = self._engine
        hang = engine.hang_report()
        own = failure.rank == engine.rank and not is_hearsay(failure)
        details = f"{hang}\n{stacks()}" if own else hang
        if engine.latch.set(failure):
            self._details = details
            engine.abort(failure._replace(traceback=details) if own else failure)

    def _tell(self, latch: FailureLatch) -> None:
        engine, failure = self._engine, latch.failure
        view = engine.view() | {"stacks": stacks(), "failure": failure._asdict()}
        me = f"[rrfp] {self._name(engine.rank)}"
        when = f"in call {view['call']}" if view["in_call"] else f"after call {view['call']}" if view["call"] >= 0 else "before its first call"
        lines = [f"{me}: {describe(failure, self._name)}",
                 f"{me} {when}: running {engine.running or 'nothing'}, last action {engine.last_action}"]
        lines += [self._details] if self._details else []
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {socket.gethostname()}, process {os.getpid()}"
        try:
            path = self._report("\n".join([stamp, *lines]), view)
        except Exception as error:  # whatever went wrong with the file, what follows must still be said
            path, lines = None, [*lines, f"{me}: no report was written: {error!r}"]
        engine.recorder.flush()  # the process may end without another chance to write what the failed call did
        if failure.rank == engine.rank and not self._details and not is_hearsay(failure):
            return  # the main thread raised it: its own traceback says all
        if engine.in_call:
            # The main thread will raise the failure with the remote traceback: once is enough.
            lines[0] = f"{me}: {describe(failure._replace(traceback=''), self._name)}"
        lines.append(f"{me}: {f'report in {path}; ' if path else ''}this process ends within {self._grace:.0f} s")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _arm(self) -> None:
        # A C thread that needs no interpreter lock: it ends the process even from inside a collective or interpreter shutdown.
        self._armed = True
        faulthandler.dump_traceback_later(self._grace, exit=True, file=2)


def stacks() -> str:
    """Where the main thread is, and every other Python thread that is not the pipeline's own."""
    frames = sys._current_frames()
    try:
        threads = [thread for thread in threading.enumerate() if thread.ident in frames and not thread.name.startswith("rrfp")]
        threads.sort(key=lambda thread: thread is not threading.main_thread())
        return "\n".join(
            f"--- thread {thread.name} ---\n{''.join(traceback.format_stack(frames[thread.ident])).rstrip()}" for thread in threads)
    finally:
        frames.clear()  # this frame is among them: a cycle that would keep alive what every thread was using

