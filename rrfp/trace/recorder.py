"""Records what a rank does, cheaply enough to stay on: while a call runs, an event is one tuple appended to a list.

One file per rank, one JSON value a line: first an object that says who writes and how its clock relates to wall time, then
arrays, times in seconds of time.monotonic():

    ["begin", call, microbatches, forward only, time, mode]     (mode, as `rrfp.mode` writes it, only where it is known)
    ["action", call, "2F0", start, end, in flight, padded]
    ["wait", call, cause, start, end]
    ["arrival", call, "0>1", microbatch, time]      ["sent", call, "0>1", microbatch, time]
    ["moved", call, stream, what, start, end]       (a collective on a stream of its own)
    ["end", call, time]

Threads: `arrival`, `sent` and `moved` may come from any thread (list.append is atomic); everything else from the engine's thread.
Nothing blocks, except the file write after a call has ended. A write that fails ends the trace with one warning: it never
ends the training.
"""

import json
import os
import socket
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from rrfp.action import Action, Edge
from rrfp.trace.breakdown import Breakdown, break_down


class Recorder:
    """Records the calls of one rank.

    Args:
        rank: this rank; names the file `rank<r>.jsonl`.
        stages: the stages that it owns.
        directory: where to write. None keeps only the breakdown of the last call.
        ranks: how many ranks write into `directory`, so that a reader can say which are missing.
        nvtx: open an NVTX range per action (Megatron's `--profile`); needs torch with CUDA.
        debug: refuse overlapping spans with ValueError in `end_call`, instead of clipping and counting them.
        mode: what calls run under (`rrfp.mode`), if that is known; it may change between calls.
    """

    def __init__(
        self,
        *,
        rank: int,
        stages: Sequence[int],
        directory: Path | None,
        ranks: int | None = None,
        nvtx: bool = False,
        debug: bool = False,
        mode: str | None = None,
    ):
        self.nvtx = nvtx
        self.mode = mode
        self.kept: list = []
        """The lines of the last call that was to be kept, the header first."""
        self._keep = False
        self._rank = rank
        self._debug = debug
        self._file = None if directory is None else Path(directory) / f"rank{rank}.jsonl"
        self._header = {"rank": rank, "stages": list(stages), "ranks": ranks}
        self._started = False
        self._events: list[tuple] = []
        self._call = -1
        self._begin: tuple | None = None
        self._last: Breakdown | None = None
        self._ranges = 0

    def begin_call(self, call: int, *, microbatches: int, forward_only: bool, now: float) -> None:
        """A call of the schedule starts at `now`. A call that was never ended stays in the file without an end."""
        self.flush()
        self._call = call
        self._begin = ("begin", call, microbatches, forward_only, now, *(() if self.mode is None else (self.mode,)))
        self._events.append(self._begin)

    def keep_next(self) -> None:
        """The next call is kept in memory too, as lines of the file: `kept`, once it has ended."""
        self._keep = True

    def start_action(self, action: Action) -> None:
        """Before an action: opens its NVTX range. Does nothing unless `nvtx`."""
        if self.nvtx:
            _nvtx().range_push(str(action))
            self._ranges += 1

    def launched(self) -> None:
        """An action's work has been handed to a device: closes its NVTX range, which the host's next one must not lie in."""
        self._close_ranges()

    def action(self, action: Action, start: float, end: float, in_flight: int, padded: float = 0.0) -> None:
        """An action ran. `in_flight`: activations that its stage held while it ran. `padded`: emulated seconds at its end."""
        self._events.append(("action", self._call, action, start, end, in_flight, padded))
        if self._ranges:
            _nvtx().range_pop()
            self._ranges -= 1

    def waited(self, cause: str, start: float, end: float) -> None:
        """The engine had nothing to do; `cause` is one of `breakdown.CAUSES`."""
        self._events.append(("wait", self._call, cause, start, end))

    def arrival(self, edge: Edge, microbatch: int, time: float) -> None:
        if self._file is not None or self._keep:
            self._events.append(("arrival", self._call, edge, microbatch, time))

    def sent(self, edge: Edge, microbatch: int, time: float) -> None:
        if self._file is not None or self._keep:
            self._events.append(("sent", self._call, edge, microbatch, time))

    def moved(self, stream: str, what: str, start: float, end: float) -> None:
        """A collective ran on `stream`, beside the actions."""
        if self._file is not None or self._keep:
            self._events.append(("moved", self._call, stream, what, start, end))

    def end_call(self, now: float) -> None:
        """The call ended at `now`: works out its breakdown and writes the file. Raises ValueError for overlaps under `debug`."""
        self._events.append(("end", self._call, now))
        self._close_ranges()
        _, call, microbatches, forward_only, begin, *_ = self._begin
        events = [event for event in self._events if event[1] == call]
        if self._keep:
            self.kept, self._keep = [self._clock(), *map(_line, events)], False
        try:
            self._last = break_down(
                (event[2:] for event in events if event[0] == "action"),
                (event[2:] for event in events if event[0] == "wait"),
                begin,
                now,
                rank=self._rank,
                call=call,
                microbatches=microbatches,
                forward_only=forward_only,
                debug=self._debug,
            )
        finally:
            self.flush()

    @property
    def last_call(self) -> Breakdown | None:
        """Where the time of the last call went; None before the first has ended."""
        return self._last

    def flush(self) -> None:
        """Appends to the file what was recorded since the last time. Not for use inside a call unless something went wrong."""
        # A sender's thread may append meanwhile: take a prefix, so that its event stays for the next time.
        events = self._events[:]
        del self._events[: len(events)]
        if self._file is None or (not events and self._started):
            return
        lines = [json.dumps(self._clock())] if not self._started else []
        lines += [json.dumps(_line(event)) for event in events]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Opened for each write: a forked child inherits neither a descriptor nor a buffer.
            with open(self._file, "a" if self._started else "w") as file:
                file.write("\n".join(lines) + "\n")
            self._started = True
        except OSError as error:
            warnings.warn(f"the trace ends here: {self._file} cannot be written ({error})", RuntimeWarning, stacklevel=2)
            self._file = None

    def close(self) -> None:
        """Writes what is left. Safe to call twice, and inside a call that failed."""
        self._close_ranges()
        self.flush()

    def _close_ranges(self) -> None:
        # An action that raised has not closed its range.
        while self._ranges:
            _nvtx().range_pop()
            self._ranges -= 1

    def _clock(self) -> dict:
        """The header. Files with the same `boot` share a monotonic clock; others are related through wall time."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        clock = {"monotonic": time.monotonic(), "wall": time.time(), "boot": boot}
        return {"rrfp_trace": 1} | self._header | clock | {"host": socket.gethostname(), "pid": os.getpid()}


def _line(event: tuple) -> list:
    """An event as JSON holds it."""
    return [str(part) if isinstance(part, (Action, Edge)) else part for part in event]


def _nvtx():
    # Lazily: a trace needs torch only for this.
    from torch.cuda import nvtx

    return nvtx
