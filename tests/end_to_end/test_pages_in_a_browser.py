"""Generated pages in a real browser: an empty error console, hover, zoom, filters by key, a phone and dark mode."""

import sys
from pathlib import Path

import pytest

import browser
import comparison_records
import evidence_records
import plan_records
import prediction_records
from plimsoll.records.diagnosis import Share
from plimsoll.report.render import render

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "report"))
from report_records import eventful_run, machine

pytestmark = pytest.mark.browser

SHARES = (Share(category="activations", num_bytes=3 << 20, known="counted", place="model.py:7"),)
RECORDS = {
    "run": eventful_run(),
    "plan": plan_records.fitting_plan(),
    "prediction": prediction_records.fitting(),
    "diagnosis": evidence_records.diagnosis(shares=SHARES),
    "comparison": comparison_records.comparison(),
    "machine": machine(),
}


@pytest.fixture(scope="module")
def tab():
    program = browser.chromium()
    if program is None:
        pytest.skip(f"there is no Chromium here (looked for {', '.join(browser.NAMES)})")
    with browser.opened(program) as opened:
        yield opened


@pytest.fixture
def pages(tmp_path):
    for name, record in RECORDS.items():
        (tmp_path / f"{name}.html").write_text(render(record, "html"), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", RECORDS)
def test_a_page_opens_without_errors_and_fits_a_phone(name, tab, pages):
    for width, scheme in ((360, "light"), (360, "dark"), (1280, "light")):
        tab.show(pages / f"{name}.html", width=width, scheme=scheme)
        assert tab.errors() == []
        assert tab.value("document.documentElement.scrollWidth") <= width  # innerWidth grows with the page
        background = tab.value("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 23, 26)" if scheme == "dark" else "rgb(251, 251, 250)")
    assert (pages / f"{name}.html").stat().st_size < 6_000_000


def test_a_chart_tells_what_is_under_the_pointer(tab, pages):
    tab.show(pages / "prediction.html")
    tab.value("document.querySelector('.chart').scrollIntoView({block: 'center'})")
    box = tab.value("(({x, y, width, height}) => ({x, y, width, height}))"
                    "(document.querySelector('.chart .nsewdrag').getBoundingClientRect())")  # fmt: skip
    tab.point(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2)
    tab.wait_for("document.querySelector('.hoverlayer').textContent.includes('activations')")


def test_a_part_of_a_chart_is_chosen_by_dragging_and_by_keys_and_given_back(tab, pages):
    tab.show(pages / "prediction.html")
    shown = "(([low, high]) => high - low)(document.querySelector('.chart')._fullLayout.xaxis.range)"
    whole = tab.value(shown)
    tab.value("document.querySelector('.chart').scrollIntoView({block: 'center'})")
    box = tab.value("(({x, y, width, height}) => ({x, y, width, height}))"
                    "(document.querySelector('.chart .nsewdrag').getBoundingClientRect())")  # fmt: skip
    tab.drag(box["x"] + 0.3 * box["width"], box["x"] + 0.6 * box["width"], box["y"] + box["height"] / 2)
    tab.wait_for(f"{shown} < {0.5 * whole}")
    tab.value("document.querySelector('[aria-label=\"Reset the zoom\"]').focus()")
    tab.key("Enter", 13)
    tab.wait_for(f"{shown} === {whole}")
    tab.value("document.querySelector('[aria-label=\"Zoom in\"]').focus()")
    tab.key("Enter", 13)
    tab.wait_for(f"{shown} === {whole / 2}")


def test_a_category_is_hidden_and_shown_by_keys(tab, pages):
    tab.show(pages / "prediction.html")
    pressed = "document.querySelector('[data-name=activations]').getAttribute('aria-pressed')"
    drawn = "document.querySelector('.chart')._fullData.find(trace => trace.name === 'activations').visible"
    tab.value("document.querySelector('[data-name=activations]').focus()")
    for word, is_drawn in (("false", "false"), ("true", "true")):
        tab.key(" ", 32)
        tab.wait_for(f"{pressed} === '{word}' && {drawn} === {is_drawn}")


def test_the_first_key_leads_past_the_head_and_the_scheme_is_chosen_with_the_charts(tab, pages):
    tab.show(pages / "run.html")
    tab.key("Tab", 9)
    assert tab.value("document.activeElement.className") == "skip"
    colour = "document.querySelector('.chart')._fullLayout.paper_bgcolor"
    assert tab.value(colour) == "#fbfbfa"
    tab.value("document.querySelector('.scheme').click()")
    tab.wait_for(f"{colour} === '#14171a'")
    assert tab.value("document.querySelector('.scheme').getAttribute('aria-pressed')") == "true"
    tab.value("document.querySelector('.scheme').click()")
    tab.wait_for(f"{colour} === '#fbfbfa'")
    assert tab.errors() == []
