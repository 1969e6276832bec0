"""A training DAG as a picture: a lane per device group and stream, nodes where the virtual clock has them, data between lanes as lines."""

from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.program.clock import Run
from rrfp.program.dag import COMPUTE, DAG, DATA, RECV, SEND, UPDATE, Node
from rrfp.program.place import COMPUTE_STREAM
from rrfp.trace.picture import COLOURS

_COLOURS = COLOURS | {SEND: "#b8bdc5", RECV: "#b8bdc5", UPDATE: "#333333"}
_INK = "#333333"
_DPI = 150
_LANE = 0.3  # inches


def draw(dag: DAG, run: Run, path: Path, *, title: str = "") -> None:
    """Writes a PNG. A node's number is its microbatch. Raises ConfigurationError if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigurationError("no picture: matplotlib is not installed (pip install matplotlib)") from error
    lanes = _lanes(dag)
    height = 1.1 + _LANE * len(lanes)
    figure = Figure(figsize=(16, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.5 / height, 0.885, _LANE * len(lanes) / height))
    place = {lane: index for index, lane in enumerate(lanes)}
    pixels = 16 * 0.885 * _DPI / (run.makespan or 1)
    ends: dict[str, tuple[float, float, int]] = {}
    boxes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for name, (start, end) in run.spans.items():
        node = dag.nodes[name]
        at = place[node.devices, node.stream]
        ends[name] = (start, end, at)
        boxes.setdefault((at, _COLOURS[_kind(node)]), []).append((start, end - start))
        label = ",".join(map(str, node.dims.values()))
        if (end - start) * pixels > 9 * len(label) and label:
            axes.text((start + end) / 2, at, label, ha="center", va="center_baseline", fontsize=5.5, color="white", zorder=4)
    for (at, colour), spans in boxes.items():
        spans = [(start, max(width, 1.5 / pixels)) for start, width in spans]
        axes.broken_barh(spans, (at - 0.4, 0.8), facecolor=colour, edgecolor="none", zorder=3)
    gaps = [(start, at) for start, end, at in ends.values() if (end - start) * pixels > 4]
    axes.vlines([start for start, _ in gaps], [at - 0.4 for _, at in gaps], [at + 0.4 for _, at in gaps], colors="white", linewidth=0.5, zorder=4)
    for edge in dag.edges:
        (_, left, low), (right, _, high) = ends[edge.source], ends[edge.destination]
        if edge.kind == DATA and low != high and not edge.tensor.startswith("grad."):  # of those there are too many to see
            axes.plot([left, right], [low, high], color="#9aa3ad", linewidth=0.35, zorder=1)
    axes.set_xlim(0, run.makespan * 1.002)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [_lane_name(devices, stream) for devices, stream in lanes], fontsize=7, color=_INK)
    axes.tick_params(axis="both", length=0, labelsize=7, colors=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("time in forwards of a segment", fontsize=8, color=_INK)
    figure.text(0.1, 1 - 0.28 / height, title, fontsize=11, fontweight="bold", color=_INK)
    found = dict.fromkeys(_kind(node) for node in dag.nodes.values())
    figure.legend([Patch(facecolor=_COLOURS[kind]) for kind in found], list(found), loc="upper right", ncols=len(found), frameon=False, fontsize=7.5,
                  bbox_to_anchor=(0.99, 1 - 0.05 / height))
    figure.savefig(path, dpi=_DPI)


def _kind(node: Node) -> str:
    return node.phase if node.kind == COMPUTE else node.kind


def _lanes(dag: DAG) -> list[tuple[tuple[int, ...], str]]:
    """Device groups in order, of each computation first."""
    found = {(node.devices, node.stream) for node in dag.nodes.values()}
    return sorted(found, key=lambda lane: (lane[0][0], len(lane[0]), lane[1] != COMPUTE_STREAM, lane[1]))


def _lane_name(devices: tuple[int, ...], stream: str) -> str:
    text = ",".join(map(str, devices)) if len(devices) <= 4 else f"{devices[0]}..{devices[-1]}"
    return f"device {text}" if stream == COMPUTE_STREAM else stream
