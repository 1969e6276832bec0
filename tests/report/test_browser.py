"""How the page behaves, in headless Chromium: nothing is fetched, nothing fails, hovering explains, zooming zooms."""

import re
from dataclasses import replace

import pytest
from browser import FOUND, MISSING, Browser
from simulated import late_edge, scenario, straggler
from views import waiting

from rrfp.report import page
from rrfp.report.analysis import Finding, Suggestion, analyse
from rrfp.report.hang import merge
from rrfp.report.page import write_page

if FOUND is None:
    pytest.skip(MISSING, allow_module_level=True)  # one line in the summary


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture
def another_browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture
def analysis(timeline):
    return analyse(timeline(straggler(stages=4, microbatches=8, stage=2)), call=0, simulations=False)


@pytest.fixture
def show(browser, tmp_path):
    """`show(analyses, ...)` writes a page and opens it; when the test is over, nothing must have failed or been fetched."""

    def show(*analyses, width=1280, height=800, dark=False, **options):
        path = tmp_path / "page.html"
        write_page(analyses, path, **options)
        browser.open(path, width=width, height=height, dark=dark)
        return browser

    yield show
    check(browser)


def check(browser) -> None:
    browser.settle()
    assert browser.errors == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1


def view(browser) -> tuple[float, float]:
    browser.settle()
    return tuple(map(float, browser.js("document.getElementById('timeline').dataset.view").split()))


def place(browser, analysis, time, stage) -> tuple[float, float]:
    """Where on the screen a moment of a stage is, from what the page shows, not from its code: labels take the left 80 pixels."""
    browser.js("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    browser.settle()
    x, y, width, height = browser.js("(({ x, y, width, height }) => [x, y, width, height])(document.getElementById('timeline').getBoundingClientRect())")
    t0, t1 = view(browser)
    rows = sorted(map(int, analysis.rank_of))
    pitch = (height - 22 - 12) / len(rows)
    return x + 80 + (time - t0) / (t1 - t0) * (width - 80), y + 22 + (rows.index(stage) + 0.4) * pitch


def hover(browser, analysis, time, stage) -> str:
    browser.mouse("mouseMoved", *place(browser, analysis, time, stage))
    browser.settle()
    return browser.js("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")


def pixel(browser, analysis, time, stage) -> tuple[int, ...]:
    x, y = place(browser, analysis, time, stage)
    return tuple(browser.js(
        f"(() => {{ const canvas = document.getElementById('timeline'), box = canvas.getBoundingClientRect(); "
        f"const pen = new OffscreenCanvas(1, 1).getContext('2d', {{ willReadFrequently: true }}); "
        f"pen.drawImage(canvas, -Math.round({x} - box.x), -Math.round({y} - box.y)); return [...pen.getImageData(0, 0, 1, 1).data] }})()"))


def test_a_failure_comes_first_and_only_if_there_is_one(show, analysis):
    browser = show(analysis)
    assert browser.js("document.getElementById('failure').hidden")
    views = [waiting(peers={"1": 9.2}, last_action="<b>0F5</b>")]
    browser = show(analysis, failure=merge(views), width=390)
    assert not browser.js("document.getElementById('failure').hidden")
    assert browser.js("document.querySelector('#failure .first').innerText") == merge(views).verdict
    browser.js("document.querySelector('#failure details').open = true")
    assert browser.js("document.querySelector('#failure pre').textContent") == merge(views).text()
    assert browser.js("document.documentElement.scrollWidth") <= 390, "long lines scroll inside"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_without_an_error_and_fits(show, analysis, width, dark):
    browser = show(analysis, width=width, dark=dark)
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.js("document.querySelector('#verdict .first').innerText") == analysis.findings[0].text
    assert browser.js("[...document.querySelectorAll('section')].every((each) => each.innerText.trim())")
    background = browser.js("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("script", ["nothing.like.this()", "console.error('broken')", "}", "fetch('https://example.invalid/')"])
def test_a_broken_script_is_noticed(another_browser, analysis, tmp_path, monkeypatch, script):
    # The negative control of every test here, in a browser of its own: a fetch may fail after the page has been left.
    browser = another_browser
    parts = {each.name: each.read_text() for each in page._HERE.iterdir() if each.suffix in (".html", ".css", ".js")}
    parts["page.js"] += script
    for name, text in parts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(page, "_HERE", tmp_path)
    write_page([analysis], tmp_path / "made.html")
    browser.open(tmp_path / "made.html")
    with pytest.raises(AssertionError):
        check(browser)


def test_hovering_an_action_says_why_it_started_then(show, analysis):
    browser = show(analysis)
    for each in analysis.actions[::7]:
        text = hover(browser, analysis, (each.start + each.end) / 2, each.stage)
        assert text.startswith(each.name + ":") and each.reason in text
        assert (f"idled before, for: {each.waited_for}" if each.waited_for else "did not idle before") in text
        assert ("On the critical path" in text) == each.critical
    browser.mouse("mouseMoved", 5, 5)
    assert browser.js("document.getElementById('tip').hidden")


def test_hovering_a_wait_says_its_cause(show, analysis):
    browser = show(analysis)
    longest = sorted(analysis.waits, key=lambda wait: wait.start - wait.end)[:6]
    for each in longest:
        text = hover(browser, analysis, (each.start + each.end) / 2, each.rank)  # a stage per rank
        assert text.startswith(f"rank {each.rank} idle: {each.cause}")
        assert each.culprit is None or f"Waited for: {each.culprit}" in text


def test_zooming_and_moving(show, analysis):
    browser = show(analysis)
    whole = view(browser)
    assert whole == pytest.approx((0, analysis.seconds))
    x, y = place(browser, analysis, analysis.seconds / 4, 1)
    # A wheel that has just scrolled the page goes on scrolling it.
    browser.js("lastScroll = performance.now() + 1e6")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    assert view(browser) == whole
    browser.js("lastScroll = -1e9")
    x, y = place(browser, analysis, analysis.seconds / 4, 1)
    browser.js("lastScroll = -1e9")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx(analysis.seconds * 2.718281828**-0.5, rel=0.02)
    # What was under the pointer stays there.
    assert zoomed[0] + (zoomed[1] - zoomed[0]) / 4 == pytest.approx(analysis.seconds / 4, rel=0.02)
    browser.mouse("mousePressed", x, y, button="left", clickCount=2)
    browser.mouse("mouseReleased", x, y, button="left", clickCount=2)
    assert view(browser) == whole

    left, right = (place(browser, analysis, analysis.seconds * share, 2) for share in (0.5, 0.75))
    browser.drag(left[0], right[0], left[1])
    assert view(browser) == pytest.approx((analysis.seconds * 0.5, analysis.seconds * 0.75), rel=0.02)
    left, right = (place(browser, analysis, analysis.seconds * share, 2) for share in (0.55, 0.6))
    browser.drag(left[0], right[0], left[1], shift=True)
    moved = view(browser)
    assert moved == pytest.approx((analysis.seconds * 0.45, analysis.seconds * 0.7), rel=0.02)

    browser.js("document.getElementById('timeline').focus()")
    browser.key("ArrowRight")
    assert view(browser)[0] == pytest.approx(moved[0] + 0.2 * (moved[1] - moved[0]))
    browser.key("+")
    assert view(browser)[1] - view(browser)[0] == pytest.approx(0.6 * (moved[1] - moved[0]))
    browser.key("0")
    assert view(browser) == whole
    # Out beyond the whole, the wheel belongs to the page.
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=300)
    assert view(browser) == whole


def test_colours_are_those_of_the_kinds_and_the_critical_path_stands_out(show, analysis):
    browser = show(analysis)
    one = next(each for each in analysis.actions if each.kind == "F" and not each.critical)
    other = next(each for each in analysis.actions if each.kind == "B" and each.critical)
    spots = [(each.start + (each.end - each.start) * 0.12, each.stage) for each in (one, other)]
    assert [pixel(browser, analysis, *spot) for spot in spots] == [(0x3F, 0x7F, 0xC1, 255), (0x3B, 0x9C, 0x5F, 255)]
    browser.js("document.getElementById('toggle').click()")
    browser.settle()
    faded, kept = (pixel(browser, analysis, *spot) for spot in spots)
    assert faded != (0x3F, 0x7F, 0xC1, 255) and kept == (0x3B, 0x9C, 0x5F, 255)


def test_a_step_of_the_critical_path_is_shown_in_the_timeline(show, analysis):
    browser = show(analysis)
    steps = browser.js("[...document.querySelectorAll('#critical details tbody tr')].map((row) => row.cells[0].innerText || row.cells[0].textContent)")
    assert steps == [each.name for each in analysis.critical_path]
    browser.js("document.querySelectorAll('#critical details tbody tr')[5].click()")
    t0, t1 = view(browser)
    segment = analysis.critical_path[5]
    assert t0 <= segment.start and segment.end <= t1 and t1 - t0 < analysis.seconds / 2


def test_figures_are_the_analysis(show, analysis):
    browser = show(analysis)
    figures = browser.js("document.getElementById('figures').innerText")
    computing = sum(parts["compute"] for parts in analysis.utilisation.values()) / analysis.seconds / analysis.ranks
    assert f"{100 * computing:.0f}%" in figures and f"{analysis.seconds * 1e3:.0f} ms" in figures
    assert " ".join(map(str, analysis.peak_in_flight.values())) in figures
    rows = browser.js("[...document.querySelectorAll('#durations tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))")
    spreads = sorted(analysis.durations, key=lambda each: (each.stage, "FBIW".index(each.kind)))
    assert [re.sub("\u25b2 ", "", row[0]) for row in rows] == [each.where for each in spreads]
    for row, each in zip(rows, spreads):
        assert float(row[3]) == pytest.approx(each.p50 * 1e3, rel=0.01)
        assert row[-1] == f"{100 * each.variability:.0f}%" or each.variability < 0.0995
    # No message took any time: a line instead of rows of zeros.
    assert "6 edges, 48 messages: no time passed" in browser.js("document.getElementById('messages').innerText")
    idle = browser.js("[...document.querySelectorAll('#bubbles tbody b')].map((each) => each.innerText)")
    totals = {cause: sum(parts[cause] for parts in analysis.bubbles.values()) for cause in analysis.bubbles["0"]}
    # What can be mended where it is, what follows from that, what every pipeline has.
    groups = [("late message", "memory limit", "fixed order", "announced wait", "runtime"), ("slow upstream", "slow downstream"), ("warm-up", "drain")]
    assert idle == [cause for group in groups for cause in sorted(group, key=totals.get, reverse=True) if totals[cause] > 0]


def test_what_findings_name_is_marked(show, timeline):
    one = analyse(timeline(late_edge(stages=4, microbatches=6, edge="1>2")), call=0, simulations=False)
    findings = [Finding("late edge", "edge 1>2", "Messages are late.", ("p50",), 1.0, "look at the link.", (2,), ("1>2",), "late message"),
                Finding("limit", "limit 1f1b", "Small.", (), 0.7, "enlarge it.", (0, 1), (), "memory limit"),
                Finding("imbalance", "stages 0, 3", "Slow.", (), 0.5, "move layers.", (0, 3))]
    browser = show(replace(one, findings=findings, suggestion=Suggestion("limit 2p", "ready:fill-alt:2p", 1.12, 1.0)))
    marked = "[...document.querySelectorAll('#{0} tbody tr')].map((row) => row.cells[0].innerText).filter((text) => text.startsWith('\u25b2'))"
    assert browser.js(marked.format("messages")) == ["\u25b2 1>2"]
    # Durations are marked where the work is at fault.
    assert browser.js(marked.format("durations")) == [f"\u25b2 {stage}{kind}" for stage in (0, 3) for kind in "FB"]
    ranks = browser.js("[...document.querySelectorAll('#utilisation .stacks > :nth-child(3n + 1)')].map((each) => each.innerText).slice(1)")
    assert [each.replace("\u00a0", " ") for each in ranks] == ["\u25b2\u25c6 stage 0", "\u25c6 stage 1", "\u25b2 stage 2", "\u25b2 stage 3"]
    assert "look at the link." in browser.js("document.getElementById('verdict').innerText")
    verdict = browser.js("document.getElementById('verdict').innerText")
    split = show(replace(one, suggestion=Suggestion("split", "ready:fill-r:2p-1", 1.12, 1.0))).js("document.getElementById('verdict').innerText")
    assert "Training has no flags for it" in split and "--modes ready:fill-r:2p-1" in split
    assert "Messages are late." in verdict and "Slow." in verdict and "--rrfp-hint fill-alt --rrfp-limit 2p" in verdict


def test_the_idle_time_that_a_finding_is_about_is_tall(show, timeline):
    one = analyse(timeline(late_edge(stages=4, microbatches=6, edge="1>2")), call=0, simulations=False)
    wait = max((each for each in one.waits if each.cause == "late message"), key=lambda each: each.end - each.start)
    silent = [replace(each, idle=None) for each in one.findings]
    seen = []
    for findings in (one.findings, silent):
        browser = show(replace(one, findings=findings))
        x, y = place(browser, one, (wait.start + wait.end) / 2, wait.rank)
        pitch = 26  # 26 pixels a row; `place` is 0.4 of them down, a thin bar starts 0.28 of them down, a tall one 0.08
        seen.append(browser.js(f"(() => {{ const canvas = document.getElementById('timeline'), box = canvas.getBoundingClientRect(); "
                               f"return [...canvas.getContext('2d').getImageData({x} - box.x, {y - 0.25 * pitch} - box.y, 1, 1).data] }})()"))
    assert seen[0][:3] == [0xD5, 0x5E, 0x00] and seen[1] == [0, 0, 0, 0]


def test_what_the_call_ran_under_and_what_it_would_take_is_shown(show, timeline):
    one = analyse(timeline(straggler(stages=4, microbatches=8, stage=2), "ready:announced:1f1b"), call=0)
    browser = show(replace(one, wall=1795991670.7, hosts={"0": "a", "1": "a", "2": "b", "3": "b"}))
    top = browser.js("document.getElementById('run').innerText")
    assert top == ("Call 0 \u00b7 began 2026-11-29 22:34:30 UTC \u00b7 4 stages on 4 ranks \u00b7 8 microbatches \u00b7 on a (ranks 0, 1), b (ranks 2, 3) "
                   "\u00b7 ran under --pipeline-schedule rrfp --rrfp-hint announced --rrfp-limit 1f1b")
    rows = browser.js("[...document.querySelectorAll('#savings tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))")
    shown = [row for row in one.savings if row.kind != "simulated"]
    assert len(shown) > 1 and [row[1:3] for row in rows] == [[f"{each.seconds * 1e3:.0f}", f"{each.speedup:.2f}x"] for each in shown]
    assert f"{next(each for each in one.savings if each.kind == 'simulated').seconds * 1e3:.0f} ms" in browser.js("document.getElementById('savings').innerText")


def test_another_call_can_be_chosen(show, timeline):
    run = timeline(straggler(stages=3, microbatches=4, stage=1), calls=2)
    browser = show(*(analyse(run, call=number, simulations=False) for number in (1, 0)))
    assert browser.js("document.body.dataset.call") == "1"
    browser.js("(() => { const list = document.getElementById('calls'); list.value = 1; list.dispatchEvent(new Event('change')); })()")
    assert browser.js("document.body.dataset.call") == "0"
    assert browser.js("document.querySelectorAll('canvas').length") == 1


def test_two_runs_share_one_time_axis(show, analysis, timeline):
    other = analyse(timeline(scenario("uniform", stages=4, microbatches=6)), call=0, simulations=False)
    browser = show(analysis, title="one", compare=[other], compare_title="two")
    assert view(browser) == pytest.approx((0, max(analysis.seconds, other.seconds)))
    browser.js("document.querySelector('#buttons button:nth-child(2)').click()")
    browser.settle()
    both = browser.js("[...document.querySelectorAll('canvas')].map((each) => each.dataset.view)")
    assert len(both) == 2 and both[0] == both[1] and "one, call 0" in browser.js("document.getElementById('timelines').innerText")


def test_hostile_text_is_text(show, analysis):
    hostile = "</script><img src=x onerror=\"console.error('ran')\"><b>"
    odd = replace(analysis, findings=[Finding("straggler", "stage 1", hostile, (hostile,), 1.0)], notes=[hostile], clocks={hostile: 0.001},
                  actions=[replace(each, reason=hostile, waited_for=hostile) for each in analysis.actions])
    browser = show(odd, title=hostile)
    assert browser.js("document.querySelector('#verdict .first').textContent") == hostile
    assert browser.js("document.title") == hostile == browser.js("document.getElementById('title').textContent")
    each = analysis.actions[3]
    assert hostile in hover(browser, analysis, (each.start + each.end) / 2, each.stage)
    assert browser.js("document.querySelector('img')") is None


def test_print_is_light_and_shows_everything(show, analysis):
    browser = show(analysis, dark=True)
    browser.media(dark=True, kind="print")
    browser.settle()
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.js("getComputedStyle(document.getElementById('buttons')).display") == "none"
    assert browser.js("[...document.querySelectorAll('.scroll')].every((each) => each.scrollHeight <= each.clientHeight + 1)")
    assert browser.call("Page.printToPDF", printBackground=True)["data"]


def test_many_actions_are_thinned_to_pixels(show, timeline, full):
    # 102,400 actions under --all. What is drawn is bounded by pixels, and what is in view by the view.
    stages, microbatches = (64, 800) if full else (16, 200)
    analysis = analyse(timeline(scenario("jitter-0.1", stages=stages, microbatches=microbatches)), call=0, simulations=False)
    browser = show(analysis)
    drawn = int(browser.js("document.getElementById('timeline').dataset.drawn"))
    assert 0 < drawn <= stages * (1280 - 80) / 0.7
    browser.js(f"view.set({analysis.seconds / 2}, {analysis.seconds / 2 + 0.2})")
    view(browser)
    # 0.2 s hold about ten actions of 20 or 40 ms per stage.
    assert 0 < int(browser.js("document.getElementById('timeline').dataset.drawn")) <= 16 * stages


@pytest.mark.parametrize("case", ["chunks", "forward only", "lost"])
def test_other_shapes_of_calls(show, timeline, case):
    if case == "chunks":
        run = timeline(scenario("jitter-0.1", stages=8, microbatches=8, chunks=2), "ready:bf:2p")
    elif case == "lost":
        run = timeline(scenario("jitter-0.1", stages=3, microbatches=4), lost=1)
    else:
        run = timeline(scenario("jitter-0.1", stages=3, microbatches=4))
        for trace in run.ranks.values():
            for call in trace.calls.values():
                call.forward_only = True
                call.actions[:] = [ran for ran in call.actions if ran.action.kind == "F"]
                call.waits.clear()
    analysis = analyse(run, call=0, simulations=False)
    browser = show(analysis)
    each = analysis.actions[len(analysis.actions) // 2]
    assert hover(browser, analysis, (each.start + each.end) / 2, each.stage).startswith(each.name)
    ranks = browser.js("[...document.querySelectorAll('#utilisation .stacks > :nth-child(3n + 1)')].map((each) => each.innerText).slice(1)")
    assert len(ranks) == analysis.ranks and (case != "chunks" or ranks[1].endswith("rank 1 (stage 1, 5)"))
