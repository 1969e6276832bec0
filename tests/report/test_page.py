"""What is in the page's file. How it behaves in a browser: test_browser.py."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from simulated import scenario, straggler

from rrfp.mode import parse_mode
from rrfp.report.analysis import Finding, analyse
from rrfp.report.page import embed, flags, pack, write_page
from rrfp.trace import picture

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = '</script><script>alert(1)</script> <!-- & "\u2028 @DATA@ \N{SNOWMAN}'


@pytest.fixture
def analysis(timeline):
    return analyse(timeline(straggler(stages=4, microbatches=6)), call=0, simulations=False)


def data(path) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_embedded_json_cannot_leave_its_element():
    value = {"text": HOSTILE, HOSTILE: [HOSTILE]}
    text = embed(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028") & set(text) and text.isascii()
    with pytest.raises(ValueError, match="JSON compliant"):
        embed(float("nan"))  # a browser's JSON.parse would refuse it


def test_the_page_stands_alone_and_escapes_what_it_is_given(analysis, tmp_path):
    finding = Finding("straggler", "stage 1", HOSTILE, (HOSTILE,), 1.0)
    write_page([replace(analysis, findings=[finding])], tmp_path / "page.html", title=HOSTILE)
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == text.count("</script>") == 2 and "alert(1)</script>" not in text
    assert not re.search(r"@(TITLE|STYLE|SCRIPT)@", text)
    found = data(tmp_path / "page.html")["runs"][0]
    assert found["title"] == HOSTILE and found["calls"][0]["findings"][0]["text"] == HOSTILE
    # Nothing is fetched: the only addresses are an empty icon and the name of the SVG namespace.
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", text) == ["data:,"]
    assert set(re.findall(r"https?://[^\"')\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and "url(" not in text and "fetch(" not in text


def test_what_is_packed_is_the_analysis(analysis):
    packed = pack(analysis)
    assert len(packed["actions"]["kind"]) == len(analysis.actions) == 4 * 6 * 2
    for i, each in enumerate(analysis.actions):
        columns = packed["actions"]
        assert f"{columns['stage'][i]}{columns['kind'][i]}{columns['microbatch'][i]}" == each.name
        assert columns["start"][i] == pytest.approx(each.start * 1e6, abs=0.5)
        assert columns["end"][i] == pytest.approx(each.end * 1e6, abs=0.5)
        assert (columns["reason"][i], columns["waited_for"][i], bool(columns["critical"][i])) == (each.reason, each.waited_for, each.critical)
    assert packed["waits"]["cause"] == [each.cause for each in analysis.waits]
    assert packed["stages"] == [0, 1, 2, 3] and packed["findings"] == [vars(each) for each in analysis.findings]
    assert json.loads(json.dumps(packed))["bubbles"] == analysis.bubbles


@pytest.mark.parametrize("mode, expected", [
    ("ready:fill-alt:2p", "--pipeline-schedule rrfp --rrfp-hint fill-alt --rrfp-limit 2p"),
    ("ready:alt:eager:free:lanes=4", "--pipeline-schedule rrfp --rrfp-hint alt --rrfp-limit eager --rrfp-order free --rrfp-lanes 4"),
    ("strict:1f1b:1f1b", "--pipeline-schedule rrfp --rrfp-hint 1f1b --rrfp-limit 1f1b --rrfp-mode strict"),
    ("ready:fill-r:2p-1", ""),  # training has no flag for a split backward
    ("no such mode", ""),
])
def test_a_suggestion_says_which_flags_to_pass(mode, expected):
    assert flags(mode) == expected


def test_the_flags_are_those_of_the_command_line():
    import argparse

    from rrfp.megatron.arguments import add_arguments, options_from

    mode = "ready:alt:eager:free:lanes=4"
    arguments = add_arguments(argparse.ArgumentParser()).parse_args(flags(mode).split())
    assert options_from(arguments).policy == parse_mode(mode)


def test_two_runs(analysis, tmp_path):
    write_page([analysis, replace(analysis, call=7)], tmp_path / "page.html", title="a", compare=[analysis], compare_title="b")
    runs = data(tmp_path / "page.html")["runs"]
    assert [(run["title"], [call["call"] for call in run["calls"]]) for run in runs] == [("a", [0, 7]), ("b", [0])]
    with pytest.raises(ValueError, match="at least one"):
        write_page([], tmp_path / "none.html")


def test_a_large_call_stays_small(timeline, full):
    stages, microbatches = (64, 256) if full else (16, 64)
    analysis = analyse(timeline(scenario("jitter-0.1", stages=stages, microbatches=microbatches)), call=0, simulations=False)
    assert len(embed(pack(analysis))) < 300 * len(analysis.actions)  # bytes for an action, its waits and its part of the rest


def test_style_and_script_are_installed_and_their_colours_are_the_pictures():
    names = {each.name for each in files("rrfp.report").iterdir()}
    parts = {"page.html", "page.css", "page.js", "timeline.js"}
    patterns = re.search(r'"rrfp\.report": \[(.*?)\]', (ROOT / "setup.py").read_text())[1]
    assert parts <= names and all(f'"*{Path(name).suffix}"' in patterns for name in parts)
    style = files("rrfp.report").joinpath("page.css").read_text()
    for kind, colour in picture.COLOURS.items():
        assert f"--{kind}: {colour};" in style
    assert f"--other: {picture._OTHER};" in style and f"--warmup: {picture._WAIT};" in style
