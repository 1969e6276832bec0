"""The picture: drawn at every size, on one axis, and its colours are where the actions are."""

import sys

import pytest

from rrfp.errors import ConfigurationError
from rrfp.trace import picture
from rrfp.trace.files import read

matplotlib = pytest.importorskip("matplotlib")


def pixels(path):
    from matplotlib.image import imread

    return (imread(path)[:, :, :3] * 255).round().astype(int)


def share(image, colour):
    """Which part of the picture has this colour (a hex string)."""
    wanted = [int(colour[index : index + 2], 16) for index in (1, 3, 5)]
    return (abs(image - wanted).max(axis=2) <= 3).mean()


def test_a_row_per_stage_and_a_colour_per_kind(make, tmp_path):
    timeline = read(make(stages=4, microbatches=6, split=True, emulated=False).directory)
    picture.draw([("split", timeline)], tmp_path / "one.png")
    image = pixels(tmp_path / "one.png")
    for kind in "FIW":
        assert share(image, picture.COLOURS[kind]) > 0.02, kind
    assert share(image, picture._WAIT) > 0.02
    assert share(image, picture.COLOURS["B"]) == 0 and share(image, picture._LIGHTER["F"]) == 0


def test_a_large_peak_is_not_cut_off(make, tmp_path):
    timeline = read(make(stages=2, microbatches=3).directory)
    for trace in timeline.ranks.values():
        for call in trace.calls.values():
            call.actions = [ran._replace(in_flight=128) for ran in call.actions]
    picture.draw([("deep", timeline)], tmp_path / "one.png")
    image = pixels(tmp_path / "one.png")
    assert (image[:, -8:] == 255).all(), "something reaches the right edge"
    assert (image[:, -120:] != 255).any(), "the peaks stand at the right"


def test_emulated_time_is_lighter(make, tmp_path):
    timeline = read(make(stages=4, microbatches=6, emulated=True).directory)
    picture.draw([("emulated", timeline)], tmp_path / "one.png")
    image = pixels(tmp_path / "one.png")
    assert share(image, picture._LIGHTER["F"]) > share(image, picture.COLOURS["F"]) > 0


def test_two_runs_share_one_time_axis(make, tmp_path, monkeypatch):
    first = read(make("first", stages=3, microbatches=8).directory)
    second = read(make("second", stages=3, microbatches=4).directory)
    seen = []
    original = picture._title
    monkeypatch.setattr(picture, "_title", lambda axes, *rest: (seen.append(axes), original(axes, *rest)))
    picture.draw([("long", first), ("short", second)], tmp_path / "two.png")
    assert len(seen) == 2 and seen[0].get_xlim() == seen[1].get_xlim()
    assert seen[0].get_position().x0 == seen[1].get_position().x0 and seen[0].get_position().width == seen[1].get_position().width
    assert seen[0].get_position().y0 > seen[1].get_position().y1  # the first stands on top
    texts = [text.get_text() for text in seen[1].texts]
    assert any("\N{MINUS SIGN}" in text and "%" in text for text in texts)
    assert [label.get_text() for label in seen[0].get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]


@pytest.mark.parametrize("stages, microbatches", [(4, 8), (8, 32), (16, 64)])
def test_numbers_fit_their_bars(make, tmp_path, monkeypatch, stages, microbatches):
    timeline = read(make(stages=stages, microbatches=microbatches, emulated=False).directory)
    seen = []
    original = picture._title
    monkeypatch.setattr(picture, "_title", lambda axes, *rest: (seen.append(axes), original(axes, *rest)))
    picture.draw([("run", timeline)], tmp_path / "run.png")
    (axes,) = seen
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    assert bool(numbers) == (stages < 16)
    ran = [one for call in timeline.of_call(2).values() for one in call.actions]
    ends = sorted((one.action.stage, one.start, one.end, one.action.microbatch) for one in ran)
    zero = min(call.begin for call in timeline.of_call(2).values())
    unit = 1 if max(end for _, _, end, _ in ends) - zero >= 1 else 1e3
    for text in numbers:
        box = text.get_window_extent().transformed(axes.transData.inverted())
        stage, microbatch = round(text.get_position()[1]), int(text.get_text())
        assert any(
            s == stage and m == microbatch and (start - zero) * unit <= box.x0 and box.x1 <= (end - zero) * unit
            for s, start, end, m in ends
        ), text


def test_a_lost_and_a_missing_rank_are_shown(make, tmp_path, monkeypatch):
    run = make(stages=3, microbatches=4, lost=1)
    (run.directory / "rank2.jsonl").unlink()
    timeline = read(run.directory)
    seen = []
    original = picture._title
    monkeypatch.setattr(picture, "_title", lambda axes, *rest: (seen.append(axes), original(axes, *rest)))
    picture.draw([("lost", timeline)], tmp_path / "run.png", call=2)
    assert any("missing: rank 2" in text.get_text() for text in seen[0].texts)
    assert any(line.get_marker() == "x" for line in seen[0].lines)


def test_a_call_that_is_not_there_is_refused(make, tmp_path):
    timeline = read(make(stages=2, microbatches=2).directory)
    with pytest.raises(ConfigurationError, match="call 17 is not in the trace"):
        picture.draw([("run", timeline)], tmp_path / "run.png", call=17)


def test_without_matplotlib_there_is_one_clear_line(make, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    timeline = read(make(stages=2, microbatches=2).directory)
    with pytest.raises(ConfigurationError, match="no picture: matplotlib is not installed"):
        picture.draw([("run", timeline)], tmp_path / "run.png")
