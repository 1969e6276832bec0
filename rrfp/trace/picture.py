"""A timeline as a picture, several runs above each other on one time axis: a row per stage; where collectives ran on streams beside the
actions, a row per rank and below it one for each of its streams."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.trace.breakdown import Breakdown, break_down, combine
from rrfp.trace.files import Call, Moved, Timeline

COLOURS = {"F": "#3f7fc1", "B": "#3b9c5f", "I": "#63bfa0", "W": "#8a63b8",
           "ALL_TO_ALL": "#d9674e", "ALL_REDUCE": "#c98a2b", "REDUCE_SCATTER": "#b3a12f", "ALL_GATHER": "#6b7280"}
_LIGHTER = {"F": "#9cc3e8", "B": "#9bd3af", "I": "#bce5d6", "W": "#cdb9e4"}
_OTHER, _OTHER_LIGHTER = "#c98a2b", "#ecd0a1"
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_WAIT, _INK = "#dedede", "#333333"
_DPI = 150
_WIDTH, _LEFT, _RIGHT = 14.0, 1.0, 1.85  # inches; to the right stands "100% computing · peak 128"


def draw(
    timelines: Sequence[tuple[str, Timeline]], path: Path, call: int | Sequence[int | None] | None = None, *, unit: str | None = None
) -> None:
    """Writes a PNG: the same call of each run, every run from its own time zero, on one axis.

    The right margin gives per stage the share of time computing and the most activations in flight.

    Args:
        timelines: (title, run), drawn from top to bottom.
        call: which call; one for all runs or one per run; None is each run's last complete training call.
        unit: what times are in, where they are no seconds.

    Raises:
        ConfigurationError: matplotlib is not installed, or a run does not hold the call.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("no picture: matplotlib is not installed (pip install matplotlib)") from error

    wanted = list(call) if isinstance(call, Sequence) else [call] * len(timelines)
    runs = []
    for (title, timeline), number in zip(timelines, wanted, strict=True):
        number = timeline.typical_call() if number is None else number
        runs.append((title, timeline, number, timeline.of_call(number)))
    spans = [max(one.end for one in calls.values()) - min(one.begin for one in calls.values()) for *_, calls in runs]
    longest = max(spans) or 1e-9
    unit, scale = (unit, 1.0) if unit is not None else ("s", 1.0) if longest >= 1 else ("ms", 1e3)

    # Fixed sizes in inches: a row stays as high, and a number as legible, with 4 stages as with 64.
    row = 0.34 if max(len(_rows(timeline, calls)) for _, timeline, _, calls in runs) <= 16 else 0.2
    above, between, below = 0.66, 0.46, 0.52
    heights = [row * len(_rows(timeline, calls)) for _, timeline, _, calls in runs]
    height = above + sum(heights) + between * (len(runs) - 1) + below
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)

    inner = _WIDTH - _LEFT - _RIGHT
    pixels = inner * _DPI / (longest * 1.002)
    size = _font_size([call for *_, calls in runs for call in calls.values()], pixels, row)
    kinds, emulated = set(), False
    top = height - above
    for index, ((title, timeline, number, calls), panel, span) in enumerate(zip(runs, heights, spans)):
        axes = figure.add_axes((_LEFT / _WIDTH, (top - panel) / height, inner / _WIDTH, panel / height))
        top -= panel + between
        axes.set_xlim(0, longest * scale * 1.002)
        found, padded = _panel(axes, timeline, calls, span, scale, pixels / scale, size)
        kinds |= found
        emulated |= padded
        if len(runs) > 1:
            # The first run's end, in every panel: what the others are measured against.
            axes.axvline(spans[0] * scale, color="#888888", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        _title(axes, title, number, timeline, calls, span, spans[0] if index else None, scale, unit)
        last = index == len(runs) - 1
        axes.tick_params(axis="x", labelbottom=last, labelsize=8, colors=_INK, length=3 if last else 0)
        if last:
            axes.set_xlabel(f"time in {unit}", fontsize=9, color=_INK)
    _legend(figure, kinds, emulated, height)
    figure.savefig(path, dpi=_DPI)


def _fits(label: str, width: float, size: float) -> bool:
    """Whether digits of `size` points fit into `width` pixels."""
    return len(label) * 0.64 * size * _DPI / 72 <= width * 0.95


def _font_size(calls: Sequence[Call], pixels: float, row: float) -> float | None:
    """One size for all numbers: the largest at which nearly all fit, or None where the picture is better without."""
    bars = [((ran.end - ran.start) * pixels, str(ran.action.microbatch)) for call in calls for ran in call.actions]
    for size in (8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0):
        fitting = sum(_fits(label, width, size) for width, label in bars)
        if size <= row * 36 and fitting >= (0.85 if size > 5 else 0.6) * len(bars):
            return size
    return None


def _rows(timeline: Timeline, calls: dict[int, Call]) -> dict[tuple, str]:
    """Key -> label of each row, from top to bottom: (rank, stage); or (rank,), and (rank, stream) for each stream of that rank."""
    streams = {(rank, moved.stream) for rank, call in calls.items() for moved in _moved(call)}
    if streams:
        keys = sorted({(rank,) for rank in calls} | streams)
        return {key: f"rank {key[0]}" if len(key) == 1 else key[1] for key in keys}
    several = len(timeline.rank_of) > len(timeline.ranks)
    return {(rank, stage): f"stage {stage}" + (f" · rank {rank}" if several else "") for stage, rank in timeline.rank_of.items()}


def _moved(call: Call) -> list[Moved]:
    """Without what came after the call: losses that go round, a state that is gathered."""
    return [moved for moved in call.moved if moved.start < call.end]


def _panel(axes, timeline: Timeline, calls: dict[int, Call], span: float, scale: float, pixels: float, size: float | None):
    """One run. Returns the kinds drawn, and whether anything in it was emulated."""
    rows = _rows(timeline, calls)
    place = {key: index for index, key in enumerate(rows)}
    zero = min(call.begin for call in calls.values())
    # One collection per colour and row: thousands of actions stay quick to draw.
    boxes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    widths = sorted((ran.end - ran.start) * scale * pixels for call in calls.values() for ran in call.actions)
    # Two tones in a bar a few pixels wide are noise; the title still says how much was emulated.
    two_tones = bool(widths) and widths[len(widths) // 2] >= 9
    kinds, emulated = set(), False
    notes = []
    for rank, call in calls.items():
        ends = (call.end - zero) * scale
        own = (rank,) in place
        for at in [place[rank,]] if own else [place[rank, stage] for stage in timeline.ranks[rank].stages]:
            for _, start, end in call.waits:
                boxes[at, _WAIT].append(((start - zero) * scale, (end - start) * scale))
            if not call.complete:
                axes.plot([ends], [at], marker="x", color="#c0392b", markersize=7, clip_on=False, zorder=5)
        for stream, what, start, end in _moved(call):
            kind = what.partition(":")[0]
            kinds.add(kind)
            boxes[place[rank, stream], COLOURS.get(kind, _OTHER)].append(((start - zero) * scale, (end - start) * scale))
        for ran in call.actions:
            kind, at = ran.action.kind, place[(rank,) if own else (rank, ran.action.stage)]
            if own and ran.action.kind not in _NAMES:
                continue  # issued, and drawn where it ran; updates are too short to be seen
            start, width = (ran.start - zero) * scale, (ran.end - ran.start) * scale
            pad = min(width, ran.padded * scale) if two_tones else 0.0
            kinds.add(kind)
            if width > pad:
                boxes[at, COLOURS.get(kind, _OTHER)].append((start, width - pad))
            if pad:
                emulated = True
                boxes[at, _LIGHTER.get(kind, _OTHER_LIGHTER)].append((start + width - pad, pad))
            notes.append((at, start, width, pad, ran.action.microbatch))
    for (at, colour), spans in boxes.items():
        bar = 0.82 if colour != _WAIT else 0.5
        axes.broken_barh(spans, (at - bar / 2, bar), facecolor=colour, edgecolor="none", zorder=1 if colour == _WAIT else 2)
    # A thin gap at an action's start, so that two of a kind in a row stay two.
    gaps = [(at, start) for at, start, width, _, _ in notes if width * pixels > 4]
    heights, starts = [at for at, _ in gaps], [start for _, start in gaps]
    axes.vlines(starts, [at - 0.41 for at in heights], [at + 0.41 for at in heights], colors="white", linewidth=0.6, zorder=3)
    for at, start, width, pad, microbatch in notes:
        if size and microbatch is not None and _fits(str(microbatch), width * pixels, size):
            colour = "white" if pad < width / 2 else "#1d2b3a"
            axes.text(start + width / 2, at, str(microbatch), ha="center", va="center_baseline", fontsize=size, color=colour,
                      zorder=4)

    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), list(rows.values()), fontsize=7 if max(map(len, rows.values())) > 10 else 8, color=_INK)
    axes.tick_params(axis="y", length=0, pad=5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#888888")
    for key, text in _margin(timeline, calls, span, place).items():
        axes.annotate(text, (1, place[key]), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
                      fontsize=8, va="center", color=_INK, annotation_clip=False)
    return kinds, emulated


def _split(rank: int, call: Call) -> Breakdown:
    return break_down(call.actions, call.waits, call.begin, call.end, rank=rank, call=call.number)


def _margin(timeline: Timeline, calls: dict[int, Call], span: float, keys) -> dict[tuple, str]:
    """Per row: the share of the whole run's time that its rank computes (its own call may end earlier), and a stage's peak."""
    texts = {}
    for rank, call in calls.items():
        split = _split(rank, call)
        share = f"{split.compute / 1e7 / span:3.0f}% computing"
        for key in keys:
            if key == (rank,):
                texts[key] = share
            elif key[0] == rank and not isinstance(key[1], str):
                texts[key] = f"{share} · peak {split.peak_in_flight.get(key[1], 0)}"
    return texts


def _title(axes, title, number, timeline, calls, span, first, scale, unit) -> None:
    whole = combine(_split(rank, call) for rank, call in calls.items())
    percent = 1e-7 / (span * len(calls))
    text = f"{span * scale:,.{0 if span * scale >= 100 else 2}f} {unit}"
    if first is not None:
        change = 100 * (span / first - 1)
        text += f" ({change:+.1f}%)".replace("-", "\N{MINUS SIGN}")
    text += f"   {whole.compute * percent:.0f}% computing"
    if whole.emulated:
        text += f" ({whole.emulated * percent:.0f}% emulated)"
    text += f"   call {number}"
    if timeline.missing:
        text += f"   missing: rank {', '.join(map(str, timeline.missing))}"
    bold = axes.annotate(title, (0, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
                         fontsize=11, fontweight="bold", va="bottom", color=_INK)
    axes.annotate(text, (1, 0), xycoords=bold, xytext=(12, 0), textcoords="offset points", fontsize=10, va="bottom", color=_INK)


def _legend(figure, kinds: set[str], emulated: bool, height: float) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    order = [kind for kind in _NAMES if kind in kinds] + sorted(kinds - set(_NAMES))
    entries = [(Patch(facecolor=COLOURS.get(kind, _OTHER)), f"{kind}  {_NAMES.get(kind, '')}".rstrip()) for kind in order]
    if emulated:
        pale = tuple(Patch(facecolor=_LIGHTER.get(kind, _OTHER_LIGHTER)) for kind in order)
        entries.append((pale, "pale: emulated part (sleeping)"))
    entries.append((Patch(facecolor=_WAIT), "waiting"))
    handles, labels = zip(*entries)
    figure.legend(handles, labels, loc="upper right", bbox_to_anchor=(1 - _RIGHT / _WIDTH, 1 - 0.08 / height), ncols=len(entries),
                  handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, frameon=False, fontsize=8.5, handlelength=1.4,
                  handleheight=0.9, columnspacing=1.4, borderaxespad=0, labelcolor=_INK)
