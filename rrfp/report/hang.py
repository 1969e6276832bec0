"""The views of a job's ranks merged: who waits for which message, who owes it, and why it does not come.

A rank waits for *any* message that would let one of its next actions run, so ranks stand still for good exactly if no rank that they
wait for, over any number of steps, has a reason of its own (the OR model of deadlock detection: Knapp, Deadlock detection in
distributed databases, 1987). Such reasons are what `_reason` finds: a rank that is lost, silent, running, elsewhere, or a message
that was sent and did not arrive. Where there is none, the waits form a cycle, which is a deadlock.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rrfp.comm.transport import Failure
from rrfp.engine.failure import ELSEWHERE, describe
from rrfp.engine.view import text_of

SILENT = 5.0
"""Seconds without a sign of life from which on a rank counts as silent; signs come every two seconds at most."""
CAUSES = ("failed", "silent", "elsewhere", "running", "lost message", "lost credit", "not taken", "sender", "held", "unknown")
"""What may be found, what explains most first."""
_STACKS = 4
"""Ranks whose stacks are shown."""


@dataclass(frozen=True)
class Missing:
    """A message, or a credit, that `waiter` waits for and `owner` owes. Ranks are the pipeline's."""

    waiter: int
    owner: int
    edge: str
    microbatch: int | None
    what: str
    """`activation`, `gradient`, `message` or `credit`."""
    action: str
    """What could run with it; "" for a credit."""

    def __str__(self) -> str:
        if self.what == "credit":
            return f"a credit of {self.edge}"
        return f"the {self.what} {self.edge} microbatch {self.microbatch}"


class Found(NamedTuple):
    """Why a message does not come: a cause of `CAUSES`, and what there is to say of the one at fault."""

    cause: str
    text: str
    rank: int


@dataclass(frozen=True)
class Report:
    """What the views of a job amount to. `text` is for people, `data` for programs."""

    run: str
    verdict: str
    """One sentence: the first missing message, who owes it, and why."""
    cause: str
    """One of `CAUSES`, `deadlock`, or `none`."""
    culprit: int | None
    """The rank in the job that is at fault, if one is."""
    missing: Missing | None
    further: tuple[str, ...]
    """More to know, a line each: other missing messages, the steps of a deadlock."""
    absent: tuple[int, ...]
    """Ranks of the job of which there is no view."""
    views: tuple[dict, ...]
    states: dict[int, str]
    """Rank of the job -> what it was doing."""
    traceback: str
    """Of the rank that failed first, "" if it told none."""

    def data(self) -> dict:
        """As JSON, without the views, which have files of their own."""
        found = {name: value for name, value in vars(self).items() if name not in ("views", "missing", "traceback")}
        return found | {"missing": self.missing and asdict(self.missing), "present": [view["global_rank"] for view in self.views],
                        "states": {str(rank): state for rank, state in self.states.items()}}

    def text(self) -> str:
        """The verdict, a line for every rank, then every rank's view, then stacks of those that matter."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(view["wall"] for view in self.views)))
        lines = [f"Verdict: {self.verdict}", *(f"  {line}" for line in self.further), "",
                 f"Failure report of run {self.run}, {when}: {len(self.views)} of {len(self.states)} ranks wrote their view"]
        if self.absent:
            lines.append(f"No view of rank{'s' * (len(self.absent) > 1)} {', '.join(map(str, self.absent))}")
        lines += ["", *_table(self._rows())]
        for view in self.views:
            lines += ["", f"--- {_name(view)}, {view['host']}, process {view['pid']}: {self.states[view['global_rank']]} ---", text_of(view)]
        if self.traceback:
            lines += ["", "--- traceback of the first failure ---", self.traceback.rstrip()]
        # A failed rank's stack shows its end, not its error; where no rank is at fault, any may tell.
        telling = [view for view in self.views if self.culprit in (None, view["global_rank"])] if self.cause != "failed" else []
        for view in telling[:_STACKS]:
            if view.get("stacks"):
                lines += ["", f"--- stacks of {_name(view)} ---", view["stacks"]]
        return "\n".join(lines) + "\n"

    def _rows(self) -> list[list[str]]:
        by_rank = {view["global_rank"]: view for view in self.views}
        names = {rank: name for view in self.views for rank, name in zip(view["pipeline"], view["names"], strict=True)}
        rows = [["rank", "host", "process", "call", "what it was doing", "last action", "in flight", "idle"]]
        for rank, state in self.states.items():
            name = names.get(rank, f"rank {rank}")
            if (view := by_rank.get(rank)) is None:
                rows.append([name, "", "", "", state, "", "", ""])
                continue
            held = f"{view['in_flight']}/{view['limit']}" if view["next"] is not None else ""
            rows.append([name, view["host"], str(view["pid"]), str(view["call"]), state, view["last_action"], held,
                         f"{view['idle']:.1f} s" if view["call"] >= 0 else ""])
        return rows


def merge(views: Iterable[dict]) -> Report:
    """The report of one run.

    Args:
        views: `Engine.view` of each rank that could write one, with `run`, `world` (ranks of the job), `global_rank`, `pipeline` (the job's
            ranks of its pipeline, in order), `names` (how errors call them), `host`, `pid` and `failure` (a `Failure` as a dict, or None).

    Raises:
        ValueError: no view.
    """
    views = sorted(views, key=lambda view: view["global_rank"])
    if not views:
        raise ValueError("no view to merge")
    by_pipeline: dict[tuple[int, ...], list[dict]] = {}
    for view in views:
        by_pipeline.setdefault(tuple(view["pipeline"]), []).append(view)
    pipelines = [_Pipeline(ranks, own) for ranks, own in by_pipeline.items()]
    # The pipeline that failed first, the others only heard of it.
    pipelines.sort(key=lambda each: (each.failure is None or each.foreign, min(view["wall"] for view in each.views.values())))
    first, states = pipelines[0], {}
    for pipeline in pipelines:
        states |= pipeline.states()
    present = {view["global_rank"] for view in views}
    for rank in range(max(view["world"] for view in views)):
        states.setdefault(rank, "no view, nor is there one of its pipeline")
    cause, verdict, culprit, missing, further = first.judge()
    return Report(views[0]["run"], verdict, cause, None if culprit is None else first.ranks[culprit], missing, tuple(further),
                  tuple(sorted(set(states) - present)), tuple(views), dict(sorted(states.items())),
                  "" if first.failure is None or first.blamed is None else first.failure["traceback"])


class _Pipeline:
    """The views of one pipeline, by pipeline rank."""

    def __init__(self, ranks: Sequence[int], views: Iterable[dict]):
        self.ranks = ranks
        self.views = {view["rank"]: view for view in views}
        failures = [view for view in self.views.values() if view["failure"] is not None]
        self.failure = min(failures, key=lambda view: view["wall"])["failure"] if failures else None
        self.foreign = self.failure is not None and self.failure["where"] == ELSEWHERE
        # A rank that gave up because nothing moved is not at fault: it is the messenger.
        gave_up = {rank for rank, view in self.views.items() if view["stuck"]}
        self.blamed = None if self.failure is None or self.foreign or self.failure["rank"] in gave_up else self.failure["rank"]

    def name(self, rank: int) -> str:
        return next(iter(self.views.values()))["names"][rank]

    # ------------------------------------------------------------------ who waits for what
    def waits(self, view: dict) -> list[Missing]:
        """Each message that would let it go on, and each edge whose messages have to leave first."""
        if not view["in_call"] or view["running"] is not None or view["next"] is None:
            return []
        edges, found = view["edges"], []
        for entry in view["next"]:
            if view["due"] is None or entry["action"] in view["due"]:
                what = {"F": "activation", "B": "gradient", "I": "gradient"}.get(_kind(entry["action"]), "message")
                found += [Missing(view["rank"], edges[edge]["peer"], edge, entry["microbatch"], what, entry["action"])
                          for edge in entry["lacks"] if edge in edges]
        if not view["next"] or view["forward_only"]:  # a call that holds no activations is held by what has not left
            found += [Missing(view["rank"], end["peer"], edge, None, "credit", "")
                      for edge, end in edges.items() if end["direction"] == "out" and end["waiting"]]
        return found

    def reason(self, missing: Missing) -> Found | None:
        """Why the owner does not deliver. None if it waits itself."""
        owner, mine = missing.owner, self.views[missing.waiter]
        if owner == self.blamed:
            return Found("failed", _told(self.failure), owner)
        view = self.views.get(owner)
        if view is None:
            return self._without_view(owner, mine["call"])
        if view["call"] < mine["call"] and not view["in_call"]:
            return Found("elsewhere", f"has not entered call {mine['call']}; {_last(view)}", owner)
        if missing.what != "credit" and view["call"] >= mine["call"]:
            if view["call"] > mine["call"] or missing.microbatch in view["edges"][missing.edge].get("handed", ()):
                return self._under_way(missing, mine, view)
        if view["running"] is not None:
            return Found("running", _running(view), owner)
        if not view["in_call"]:
            return Found("unknown", f"has ended call {view['call']}", owner)
        if self.waits(view):
            return None
        held = [f"{entry['action']} is held by {entry['held']}" for entry in view["next"] if entry["held"] and not entry["lacks"]]
        return Found("held", "; ".join(held) or "has nothing that it waits for, and launches nothing: an agreement or an announced wait", owner)

    def _under_way(self, missing: Missing, mine: dict, view: dict) -> Found | None:
        """The owner's loop has handed the message over: where is it?"""
        out, into = view["edges"][missing.edge], mine["edges"][missing.edge]
        handed = out.get("handed", ()) if view["call"] == mine["call"] else ()
        behind = len(handed) - handed.index(missing.microbatch) - 1 if missing.microbatch in handed else 0
        flying = out["sent"] - into["received"]
        if behind < out["waiting"]:
            if out["credits"]:
                return Found("sender", f"has handed it to its transport, which keeps it though {out['credits']} credits are there", missing.owner)
            if into["credits"] > flying:
                text = f"waits for a credit, of which {self.name(missing.waiter)} has granted {into['credits'] - flying}: lost on the way"
                return Found("lost credit", text, missing.owner)
            return None  # a credit comes back when the waiter takes what is here
        sequence = out["sent"] + out["waiting"] - behind
        if flying > 0:
            return Found("lost message", f"has sent it, as message {sequence} of {missing.edge}, and it did not arrive: lost on the way "
                                         f"({into['received']} of {out['sent']} came)", missing.owner)
        return Found("not taken", f"has sent it, as message {sequence} of {missing.edge}, and it arrived, but the loop of "
                                  f"{self.name(missing.waiter)} has not taken it", missing.owner)

    def _without_view(self, rank: int, call: int) -> Found:
        if any(rank in view["departed"] for view in self.views.values()):
            return Found("failed", "has left in good order", rank)
        silences = [view["peers"][str(rank)] for view in self.views.values() if str(rank) in view["peers"]]
        entered = max((view["calls"][str(rank)] for view in self.views.values() if str(rank) in view["calls"]), default=None)
        if silences and min(silences) >= SILENT:
            return Found("silent", f"gives no sign of life for {min(silences):.0f} s (stopped, or its machine hangs) and wrote no view", rank)
        if entered is not None and entered < call:
            return Found("elsewhere", f"has not entered call {call}; its last was call {entered}; it wrote no view", rank)
        alive = f" (last sign of life {min(silences):.1f} s ago)" if silences else ""
        return Found("silent" if not silences else "unknown", f"wrote no view{alive}", rank)

    # ------------------------------------------------------------------ what it amounts to
    def judge(self) -> tuple[str, str, int | None, Missing | None, list[str]]:
        """Cause, verdict, the culprit's pipeline rank, the missing message, further lines."""
        waits = [missing for view in self.views.values() for missing in self.waits(view)]
        found = [(missing, reason) for missing in waits if (reason := self.reason(missing)) is not None]
        found.sort(key=lambda each: (CAUSES.index(each[1].cause), each[0].microbatch or 0, each[0].edge))
        if self.blamed is not None:
            found = [each for each in found if each[1].rank == self.blamed]
        if found:
            missing, reason = found[0]
            further = [f"{self.name(other.waiter)} waits for {other} of {self.name(other.owner)} too" if why == reason
                       else self._sentence(other, why) for other, why in found[1:] if why == reason or why.cause not in ("held", "unknown")]
            return reason.cause, self._sentence(missing, reason), reason.rank, missing, further[:8]
        if self.blamed is not None:
            return "failed", f"{self.name(self.blamed)} {_told(self.failure)}", self.blamed, None, []
        if self.foreign:
            return "failed", describe(Failure(**self.failure | {"traceback": ""}), self.name), None, None, []
        for view in self.views.values():
            if view["stuck"] and view["running"] is not None:
                return "running", f"{_name(view)} {_running(view)}, and no rank waits for it yet", view["rank"], None, []
        if waits:
            return self._cycle(waits)
        for view in self.views.values():
            if view["stuck"] and view["next"] is not None:
                why = "; ".join(view["explained"]) or "nothing is left to run"
                return "held", f"{_name(view)} stands still though no message is missing: {why}", view["rank"], None, []
        return "none", "no rank waits for another", None, None, []

    def _sentence(self, missing: Missing, reason: Found) -> str:
        owner, waiter = self.name(missing.owner), self.name(missing.waiter)
        if reason.cause == "failed":
            return f"{owner} {reason.text}; {waiter} waits for {missing}, which it owes"
        return f"{waiter} waits for {missing}, which {owner} owes: {owner} {reason.text}"

    def _cycle(self, waits: list[Missing]) -> tuple[str, str, int | None, Missing | None, list[str]]:
        """Every wait leads to a rank that waits: follow the first ones until a rank comes again."""
        first: dict[int, Missing] = {}
        for missing in sorted(waits, key=lambda each: (each.microbatch or 0, each.edge)):
            first.setdefault(missing.waiter, missing)
        path, rank = [], min(first)
        while rank not in path:
            path.append(rank)
            rank = first[rank].owner
        ring = path[path.index(rank):]
        names = " -> ".join(self.name(each) for each in [*ring, ring[0]])
        steps = [f"{self.name(each)} waits for {first[each]}{self._holder(first[each])}" for each in ring]
        return "deadlock", f"a deadlock: {names}, each waits for the next and none has a reason of its own", None, first[ring[0]], steps

    def _holder(self, missing: Missing) -> str:
        """Why the owner has not sent it: what its next action lacks, or the credit."""
        view = self.views[missing.owner]
        if missing.microbatch in view["edges"][missing.edge].get("handed", ()):
            here = self.views[missing.waiter]["edges"][missing.edge].get("here", [])
            held = f", which holds microbatches {', '.join(map(str, here))} untaken" if here else ""
            return f", which waits at {self.name(missing.owner)} for a credit from {self.name(missing.waiter)}{held}"
        return f", which {self.name(missing.owner)} owes: {'; '.join(view['explained'])}"

    def states(self) -> dict[int, str]:
        """Rank of the job -> what it was doing."""
        latest = max(view["call"] for view in self.views.values())
        states = {}
        for rank, name in enumerate(self.ranks):
            view = self.views.get(rank)
            if rank == self.blamed:
                states[name] = _told(self.failure)
            elif view is None:
                states[name] = self._without_view(rank, latest).text
            else:
                states[name] = self._state(view)
        return states

    def _state(self, view: dict) -> str:
        if not view["in_call"]:
            return f"outside the schedule, {_last(view)}"
        if view["running"] is not None:
            return _running(view)
        if waits := self.waits(view):
            return "waits for " + " or ".join(str(each).removeprefix("the ") for each in waits[:3])
        return "; ".join(view["explained"]) or "has run everything"


def _told(failure: dict) -> str:
    return f"{'was lost' if failure['lost'] else 'failed'} ({failure['where']}): {failure['text']}"


def _running(view: dict) -> str:
    return f"runs {view['running']} for {view['running_for'] or 0.0:.1f} s"


def _last(view: dict) -> str:
    return f"its last was call {view['call']}, {view['idle']:.0f} s ago" if view["call"] >= 0 else "it has not begun any"


def _name(view: dict) -> str:
    return view["names"][view["rank"]]


def _kind(action: str) -> str:
    return action.lstrip("0123456789")[:1]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
