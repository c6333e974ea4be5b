"""The page of a run: complete, self-contained, escaped, and well-formed for any run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from report_records import empty_run, eventful_run, gpu, machine, plan, step_line

import comparison_records
import evidence_records
import plan_records
import prediction_records
from plimsoll.records.device import Budget
from plimsoll.records.diagnosis import Share
from plimsoll.records.plan import Plan
from plimsoll.records.run import OomEvent, Timeline
from plimsoll.records.trace import CATEGORIES
from plimsoll.report import as_html, comparison_sheets, plan_sheets, prediction_sheets, sheets
from plimsoll.report.plotly_js import plotly_js

VOID = {"meta", "link"}
HOSTILE = "</script><script>alert(1)</script> \"'&"


class Page(HTMLParser):
    """A parser of a page that requires every element to be closed in order, and collects facts for the tests."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.figures: list[dict] = []
        self.feed(text.replace(plotly_js(), ""))
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append("json" if ("type", "application/json") in attributes else tag)

    def handle_endtag(self, tag):
        assert self.open.pop() in (tag, "json")

    def handle_data(self, data):
        if self.open[-1:] == ["json"]:
            self.figures.append(json.loads(data))
        elif self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data.strip())


def test_the_page_of_an_eventful_run_tells_its_story():
    page = Page(as_html.run_page(eventful_run()))
    words = [word for word in page.words if word]
    assert "Peak 768.0 MiB of a 1.0 GiB budget (75 %): the run stayed within budget." in words
    for label, value in sheets.key_numbers(eventful_run()):
        assert words[words.index(label) + 1] == value
    assert "undone, took fallback 1" in words
    assert "DefaultCPUAllocator: can't allocate memory" in words
    assert "cgroup memory.events oom_kill rose by 1" in words
    assert "batch_size: 64" in "".join(words)
    assert words[words.index("torch") + 1] == "2.13.0"
    assert len(page.figures) == 4


def test_the_page_is_one_file_under_6_mb_with_plotly_once():
    text = as_html.run_page(eventful_run(steps=tuple(step_line(step, loss=1.0) for step in range(1, 20_001))))
    assert len(text.encode()) < 6_000_000
    assert text.count(plotly_js()) == 1


def test_the_page_reaches_for_nothing_outside_itself():
    own = as_html.run_page(eventful_run()).replace(plotly_js(), "")
    assert "default-src 'none'" in own
    assert "http:" not in own
    assert "https:" not in own
    assert set(re.findall(r'(?:src|href)="([^"]*)"', own)) == {"data:,", "#content"}


def test_text_of_a_record_is_escaped_everywhere():
    event = OomEvent(family=HOSTILE, action=HOSTILE, raw_text=HOSTILE)
    record = eventful_run(
        name=HOSTILE,
        message=HOSTILE,
        job={"model": HOSTILE},
        versions={HOSTILE: HOSTILE},
        oom_events=(event,),
        deaths=(eventful_run().deaths[0].model_copy(update={"evidence": HOSTILE}),),
        device=gpu().model_copy(update={"name": HOSTILE}),
    )
    text = as_html.run_page(record)
    assert "alert(1)</script>" not in text
    page = Page(text)
    assert page.tags.count("script") == 4 + 3  # four figures, the colour scheme, plotly, and the drawing script
    assert page.words.count(HOSTILE.strip()) == 9  # name, message, 3 of the event, evidence, device, 2 versions


@pytest.mark.parametrize(
    "record",
    [
        empty_run(),
        empty_run(plan=Plan(budget=Budget(), fallbacks=())),
        empty_run(steps=(step_line(1, peak_bytes=None),)),
        empty_run(steps=(step_line(1, loss=float("nan")),), plan=Plan(budget=Budget(), fallbacks=())),
        empty_run(timeline=Timeline(source="measured", time_seconds=(0.0,), used_bytes=(0,))),
        eventful_run(evaluations=(), checkpoints=(), deaths=()),
    ],
    ids=["no steps", "no budget", "no memory", "nan loss", "no bytes used", "no validation"],
)
def test_a_run_that_lacks_something_still_has_a_page(record):
    page = Page(as_html.run_page(record))
    assert sheets.line_sentence(record) in page.words


def test_plotly_is_left_out_where_there_is_nothing_to_draw():
    text = as_html.run_page(empty_run())
    assert len(text) < 20_000
    assert "No step has finished." in text


def test_every_colour_of_a_chart_is_defined_in_light_and_in_dark():
    text = as_html.run_page(eventful_run())
    used = set(re.findall(r"var\((--[a-z-]+)\)", json.dumps(Page(text).figures)))
    light, dark = re.findall(r":root[^{]*\{(.*?)\}", text, flags=re.DOTALL)[:2]
    assert {"--accent", "--line", "--warning"} <= used
    for scheme in (light, dark):
        assert used <= set(re.findall(r"(--[a-z-]+):", scheme))


def test_headings_are_in_order_and_wide_tables_take_the_focus():
    text = as_html.run_page(eventful_run())
    tags = [tag for tag in Page(text).tags if tag in ("h1", "h2", "h3")]
    assert tags[0] == "h1"
    assert tags.count("h1") == 1
    assert text.count('tabindex="0"') == Page(text).tags.count("table") > 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            as_html.machine_page(machine()),
            ["Machine", "Example CPU", "Example GPU", "cgroup v2 memory.max", "no swap", "2.13.0"],
        ),
        (as_html.device_page(gpu()), ["Example GPU", "24.0 GiB, limited by hardware"]),
    ],
    ids=["machine", "device"],
)
def test_the_pages_without_charts(text, words):
    assert set(words) <= set(Page(text).words)


PREDICTIONS = {
    "fits": prediction_records.fitting(),
    "does not fit": prediction_records.too_large(),
    "empty": prediction_records.bare(),
    "cpu": prediction_records.on_cpu(),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_page_of_a_prediction_says_all_that_the_terminal_does(name):
    prediction = PREDICTIONS[name]
    page = Page(as_html.prediction_page(prediction))
    assert prediction_sheets.verdict_sentence(prediction) in page.words
    for make in ("part_sheet", "largest_sheet", "answer_sheet", "estimate_sheet", "assumption_sheet"):
        for row in getattr(prediction_sheets, make)(prediction).rows:
            assert set(row) <= set(page.words)
    assert len(page.figures) == (name != "empty")
    assert page.words.count("Details") == (name != "empty")


def test_the_what_ifs_of_a_page_say_what_fits_and_which_is_the_jobs_own():
    text = as_html.prediction_page(prediction_records.fitting())
    cells = re.findall(r'<td class="number ([^"]*)" style="--share: ([0-9.]+)" title="([^"]*)">([^<]*)</td>', text)
    assert cells == [
        ("fitting", "0.34", "range 690.0 to 710.0 MiB", "700.0 MiB"),
        ("fitting own", "0.49", "range 990.0 to 1010.0 MiB", "1000.0 MiB"),
        ("fitting", "0.49", "range 990.0 to 1010.0 MiB", "1000.0 MiB"),
        ("too-much", "1.00", "range 3.0 GiB", "✗ 3.0 GiB"),
    ]


def test_text_of_a_prediction_is_escaped_everywhere():
    hostile = prediction_records.moment(op=HOSTILE, module=HOSTILE, line=HOSTILE)
    holding = prediction_records.holding(1, "activations", HOSTILE).model_copy(update={"made": hostile})
    prediction = prediction_records.fitting(
        subject=HOSTILE,
        device=HOSTILE,
        limit_source=HOSTILE,
        moment=hostile,
        largest=(holding,),
        timeline=prediction_records.timeline(label=(HOSTILE,) * 6),
        versions={HOSTILE: HOSTILE},
    )
    text = as_html.prediction_page(prediction)
    assert "alert(1)</script>" not in text
    assert Page(text).tags.count("script") == 1 + 3  # the figure, the colour scheme, plotly, and the drawing script


def test_the_page_of_a_prediction_is_one_file_with_its_colours_in_light_and_in_dark():
    categories = dict.fromkeys(CATEGORIES, (1,) * 6)
    text = as_html.prediction_page(
        prediction_records.fitting(timeline=prediction_records.timeline(categories=categories))
    )
    own = text.replace(plotly_js(), "")
    assert "http:" not in own
    assert "https:" not in own
    used = set(re.findall(r"var\((--[a-z-]+)\)", json.dumps(Page(text).figures)))
    assert {f"--{category.replace(' ', '-')}" for category in CATEGORIES} <= used
    for scheme in re.findall(r":root[^{]*\{(.*?)\}", text, flags=re.DOTALL)[:2]:
        assert used <= set(re.findall(r"(--[a-z-]+):", scheme))


PLANS = {
    "fits": plan_records.fitting_plan(),
    "constraints": plan_records.constrained_plan(),
    "impossible": plan_records.impossible_plan(),
    "not predicted": plan(),
    "empty": plan_records.bare_plan(),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_page_of_a_plan_says_all_that_the_terminal_does(name):
    shown = PLANS[name]
    page = Page(as_html.plan_page(shown))
    assert plan_sheets.headline(shown) in page.words
    assert plan_sheets.budget_sentence(shown.budget) in page.words
    assert page.words.count(plan_sheets.verdict(shown).capitalize()) == 1
    for sentence in (plan_sheets.plain_sentence, plan_sheets.alternative_sentence, plan_sheets.constraints_sentence):
        assert sentence(shown) in [*page.words, ""]
    tables = [
        plan_sheets.chosen_sheet(shown),
        *([plan_sheets.fallback_sheet(shown)] if len(shown.fallbacks) > 1 else []),
        plan_sheets.alternative_sheet(shown),
        plan_sheets.rejected_sheet(shown, 60),
        plan_sheets.made_for_sheet(shown),
    ]
    if shown.prediction:
        make = (prediction_sheets.part_sheet, prediction_sheets.largest_sheet, prediction_sheets.assumption_sheet)
        tables += [sheet(shown.prediction) for sheet in make]
    assert {cell for sheet in tables for row in sheet.rows for cell in row} <= {*page.words, ""}
    assert len(page.figures) == (2 if shown.prediction else 0)


def test_of_many_rejected_the_page_shows_some_and_folds_the_rest_away():
    many = tuple(plan_records.rejected(plan_records.OFFLOAD, reason=f"reason {i}") for i in range(14))
    text = as_html.plan_page(plan_records.fitting_plan(rejected=many))
    assert "<h2>Rejected, 12 of 14</h2>" in text
    assert "<summary>Rejected</summary>" in text
    assert Page(text).words.count("reason 0") == 2
    assert Page(text).words.count("reason 13") == 1


def test_the_page_of_a_plan_is_one_file_with_its_colours_in_light_and_in_dark():
    text = as_html.plan_page(plan_records.impossible_plan())
    own = text.replace(plotly_js(), "")
    assert "http:" not in own
    assert "https:" not in own
    used = set(re.findall(r"var\((--[a-z-]+)\)", json.dumps(Page(text).figures)))
    for scheme in re.findall(r":root[^{]*\{(.*?)\}", text, flags=re.DOTALL)[:2]:
        assert used <= set(re.findall(r"(--[a-z-]+):", scheme))


def test_text_of_a_plan_is_escaped_everywhere():
    choice = plan_records.CHECKPOINTS.model_copy(update={"options": {"blocks": HOSTILE}})
    shown = plan_records.fitting_plan(
        fallbacks=(plan_records.configuration(choice, mib=1, seconds=1.0),),
        rejected=(plan_records.rejected(choice, reason=HOSTILE, mib=1, seconds=1.0),),
        about={"checkpointing": HOSTILE},
        why={"checkpointing": HOSTILE},
        made_for={HOSTILE: HOSTILE},
        forbidden=(HOSTILE,),
        pinned=(choice,),
    )
    text = as_html.plan_page(shown)
    assert "alert(1)</script>" not in text
    assert Page(text).tags.count("script") == 2 + 3  # the figures, the colour scheme, plotly, and the drawing script


def test_shares_of_a_diagnosis_are_bars_with_their_numbers():
    shares = (
        Share(category="optimizer states", num_bytes=300, known="measured", place=HOSTILE),
        Share(category="another word", num_bytes=100, known="assumed"),
    )
    text = as_html.diagnosis_page(evidence_records.diagnosis(shares=shares))
    bars = re.findall(r"--share: ([0-9.]+); --own: var\((--[a-z-]+)\)", text)
    assert bars == [("0.7500", "--optimizer-states"), ("0.2500", "--accent")]
    assert "300 B, 75% (measured)" in Page(text).words
    assert "alert(1)</script>" not in text
    nothing = as_html.diagnosis_page(
        evidence_records.diagnosis(shares=(shares[0].model_copy(update={"num_bytes": 0}),))
    )
    assert "Shares of the peak" not in nothing


def test_the_page_of_two_runs_has_every_table_and_chart_and_escapes_their_names():
    both = comparison_records.comparison()
    page = Page(as_html.comparison_page(both))
    for sheet in comparison_sheets.sheets_of(both):
        assert {cell for row in sheet.rows for cell in row} <= {*page.words, ""}
    assert len(page.figures) == 3
    hostile = as_html.comparison_page(both.model_copy(update={"first": comparison_records.side(name=HOSTILE)}))
    assert "alert(1)</script>" not in hostile


def test_a_page_is_reached_by_keys_and_read_on_a_phone_and_on_paper():
    for text in (as_html.run_page(eventful_run()), as_html.device_page(gpu())):
        assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
        assert text.index('class="skip" href="#content"') < text.index('<main id="content"')
        assert '<button class="scheme" type="button" hidden>' in text  # the script shows it
        assert "@media print" in text
