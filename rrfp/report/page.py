"""The report page: one HTML file that stands alone, made of analyses.

Style, script and data are inlined, so the file opens without a network, from a mail or a file share. What it shows is computed by
`rrfp.report.analysis`; this module only packs and embeds it.
"""

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode
from rrfp.report.analysis import Analysis
from rrfp.report.hang import Report
from rrfp.report.suggestion import lead
from rrfp.report.whatif import MEGATRON
from rrfp.report.words import listed

_HERE = files("rrfp.report")


def write_page(
    analyses: Sequence[Analysis],
    path: Path,
    *,
    title: str = "RRFP report",
    compare: Sequence[Analysis] = (),
    compare_title: str = "compared with",
    failure: Report | None = None,
) -> None:
    """Writes the page.

    Args:
        analyses: calls of one run; the first is shown when the page opens, the others can be chosen in it.
        path: the HTML file.
        title: the run's name. Any text: it is escaped.
        compare: calls of another run; its first is drawn below, on the same time axis, and its figures stand beside.
        compare_title: that run's name.
        failure: what ended the run, if it failed.

    Raises:
        ValueError: no analysis.
        OSError: the file can't be written.
    """
    if not analyses:
        raise ValueError("a page needs at least one analysis")
    runs = [{"title": title, "calls": [pack(each) for each in analyses]}]
    if compare:
        runs.append({"title": compare_title, "calls": [pack(compare[0])]})
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _HERE.joinpath("page.css").read_text(),
        "SCRIPT": _HERE.joinpath("timeline.js").read_text() + _HERE.joinpath("page.js").read_text(),
        "DATA": embed({"runs": runs, "failure": failure and {"verdict": failure.verdict, "further": failure.further, "text": failure.text()}}),
    }
    pieces = _HERE.joinpath("page.html").read_text().split("@")
    # Split once, and only the template: an @ in the data is never taken for a place to fill.
    Path(path).write_text("".join(parts.get(piece, piece) for piece in pieces), encoding="utf-8")


def embed(value) -> str:
    """JSON that can stand inside a <script> element: no text in it can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def pack(analysis: Analysis) -> dict:
    """An analysis as the page's script reads it: times in whole microseconds, actions and waits as columns (a third of the size)."""
    actions, waits = analysis.actions, analysis.waits
    suggestion = analysis.suggestion
    return {
        "call": analysis.call,
        "wall": analysis.wall,
        "seconds": analysis.seconds,
        "microbatches": analysis.microbatches,
        "mode": analysis.mode,
        "flags": running(analysis.mode),
        "forward_only": analysis.forward_only,
        "stages": sorted(int(stage) for stage in analysis.rank_of),
        "rank_of": analysis.rank_of,
        "actions": _columns(actions, "kind", "stage", "microbatch", "in_flight", "reason", "waited_for")
        | {"critical": [int(each.critical) for each in actions], "padded": [_us(each.padded) for each in actions]}
        | _times(actions),
        "waits": _columns(waits, "rank", "cause", "culprit") | _times(waits),
        "utilisation": analysis.utilisation,
        "bubbles": analysis.bubbles,
        "critical_path": _columns(analysis.critical_path, "name", "what") | _times(analysis.critical_path),
        "critical_totals": analysis.critical_totals,
        "in_flight": {stage: [[_us(at), n] for at, n in steps] for stage, steps in analysis.in_flight.items()},
        "peak_in_flight": analysis.peak_in_flight,
        "durations": [vars(each) for each in analysis.durations],
        "latencies": [vars(each) for each in analysis.latencies],
        "findings": [vars(each) for each in analysis.findings],
        "savings": [vars(each) for each in analysis.savings],
        "suggestion": suggestion and vars(suggestion) | {"flags": flags(suggestion.mode), "lead": lead(analysis.findings[0].cause)},
        "hosts": analysis.hosts,
        "clocks": analysis.clocks,
        "missing": without(analysis.missing),
        "notes": analysis.notes,
    }


def without(ranks: Sequence[int]) -> str:
    """What a reader must know first where ranks wrote no trace; "" where all did."""
    return f"{listed('rank', ranks).capitalize()} wrote no trace: what follows is of the others alone." if ranks else ""


def flags(mode: str) -> str:
    """The command-line flags that run under `mode` (`ready:fill-alt:2p`); "" for one that training has no flags for."""
    try:
        policy = parse_mode(mode)
    except ConfigurationError:
        return ""
    if policy.split:
        return ""
    words = ["--pipeline-schedule rrfp", f"--rrfp-hint {policy.hint}", f"--rrfp-limit {policy.limit}"]
    for name, usual in ("mode", "ready"), ("order", "microbatch"), ("lanes", 1):
        if getattr(policy, name) != usual:
            words.append(f"--rrfp-{name} {getattr(policy, name)}")
    return " ".join(words)


def running(mode: str | None) -> str:
    """The flags that a call ran under, "" where they are not known."""
    return "--pipeline-schedule 1f1b" if mode == MEGATRON else flags(mode) if mode else ""


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _times(spans) -> dict[str, list[int]]:
    return {"start": [_us(each.start) for each in spans], "end": [_us(each.end) for each in spans]}


def _columns(rows, *names: str) -> dict[str, list]:
    return {name: [getattr(row, name) for row in rows] for name in names}
