"""Records as self-contained HTML pages: each is one file that needs no network.

The style is inlined, and plotly.js (1.1 MiB) too if the page has charts. A content security policy forbids every
connection. The colour scheme follows the system until the reader chooses light or dark. jinja2 escapes text from
records. Without JavaScript, the page shows the tables but no charts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from plimsoll.records.base import Record
from plimsoll.records.corpus import CorpusFacts, FeedRates, Inspection, TokenFacts
from plimsoll.records.device import Device, Machine
from plimsoll.records.diagnosis import Diagnosis, Share
from plimsoll.records.placement import InferencePlan
from plimsoll.records.plan import Plan
from plimsoll.records.prediction import Prediction
from plimsoll.records.run import RunRecord
from plimsoll.records.run_comparison import RunComparison
from plimsoll.records.shrink import ShrinkRecord
from plimsoll.records.strategies import Strategies
from plimsoll.records.trace import CATEGORIES
from plimsoll.records.units import format_bytes
from plimsoll.records.watch import WatchRecord
from plimsoll.report import (
    comparison_sheets,
    data_sheets,
    diagnosis_sheets,
    placement_sheets,
    plan_sheets,
    prediction_sheets,
    sheets,
    shrink_sheets,
    strategy_sheets,
    watch_sheets,
)
from plimsoll.report._templates import environment
from plimsoll.report.charts import Chart, run_charts
from plimsoll.report.comparison_charts import comparison_charts
from plimsoll.report.plan_charts import fallback_chart
from plimsoll.report.plotly_js import plotly_js
from plimsoll.report.prediction_charts import prediction_chart
from plimsoll.report.shrink_charts import front_chart
from plimsoll.report.watch_charts import watch_charts


def run_page(record: RunRecord) -> str:
    """Return the page of one run, finished or not."""
    charts = run_charts(record)
    return _page(
        "run",
        record=record,
        sentence=sheets.line_sentence(record),
        key_numbers=sheets.key_numbers(record),
        charts={chart.key: chart for chart in charts},
        plotly_js=_drawn_by(charts),
        budget_sentence=plan_sheets.budget_sentence(record.plan.budget),
        plan=plan_sheets.plan_in_force_sheet(record),
        oom_events=sheets.oom_sheet(record.oom_events),
        deaths=sheets.death_sheet(record),
        checkpoints=sheets.checkpoint_sheet(record),
        steps=sheets.step_sheet(record),
        device=sheets.device_sheet(record.device),
        versions=sheets.version_sheet(record.versions),
        job_yaml=yaml.safe_dump(record.job, sort_keys=False, allow_unicode=True),
    )


def comparison_page(comparison: RunComparison) -> str:
    """Return the page of two runs side by side."""
    charts = comparison_charts(comparison)
    return _page(
        "comparison",
        names=comparison_sheets.labels(comparison),
        sentence=comparison_sheets.headline(comparison),
        job_sentence=comparison_sheets.job_sentence(comparison),
        charts={chart.key: chart for chart in charts},
        plotly_js=_drawn_by(charts),
        numbers=comparison_sheets.number_sheet(comparison),
        job=comparison_sheets.job_sheet(comparison),
        categories=comparison_sheets.category_sheet(comparison),
        places=comparison_sheets.place_sheet(comparison),
    )


def prediction_page(prediction: Prediction) -> str:
    """Return the page of a prediction."""
    chart = prediction_chart(prediction)
    return _page(
        "prediction",
        prediction=prediction,
        sentences=(
            prediction_sheets.verdict_sentence(prediction),
            *prediction_sheets.moment_sentences(prediction),
            *prediction_sheets.exchange_sentences(prediction),
        ),
        key_numbers=prediction_sheets.key_numbers(prediction),
        chart=chart,
        plotly_js=_drawn_by([chart]),
        parts_at_peak=prediction_sheets.part_sheet(prediction),
        largest=prediction_sheets.largest_sheet(prediction),
        answers=prediction_sheets.answer_sheet(prediction),
        grid=prediction_sheets.what_if_grid(prediction),
        grid_title=prediction_sheets.WHAT_IF_TITLE,
        what_if_text=prediction_sheets.what_if_text,
        range_text=prediction_sheets.range_text,
        estimates=prediction_sheets.estimate_sheet(prediction),
        assumptions=prediction_sheets.assumption_sheet(prediction),
        known_how=prediction_sheets.known_how_sentence(prediction),
        versions=sheets.version_sheet(prediction.versions),
    )


def machine_page(machine: Machine) -> str:
    """Return the page of a machine: a list of devices, details of each, and the library versions."""
    devices = [sheets.device_sheet(device) for device in machine.devices]
    return _sheets_page("Machine", "", sheets.machine_sheet(machine), *devices, sheets.version_sheet(machine.versions))


def device_page(device: Device) -> str:
    """Return the page of one device."""
    return _sheets_page(device.name, "", sheets.device_sheet(device))


def corpus_page(corpus: CorpusFacts) -> str:
    """Return the page of a corpus."""
    return _sheets_page("Corpus", "", *_corpus_sheets(corpus))


def token_page(tokens: TokenFacts) -> str:
    """Return the page of a tokenized corpus: its texts and its tokens."""
    return _sheets_page("Tokens", "", *_corpus_sheets(tokens.corpus), data_sheets.token_sheet(tokens))


def inspection_page(inspection: Inspection) -> str:
    """Return the page of a corpus, its text lengths and the batching methods."""
    own = [data_sheets.length_sheet, data_sheets.filling_sheet, data_sheets.example_sheet]
    sheets_of = [*_corpus_sheets(inspection.corpus), *(sheet_of(inspection) for sheet_of in own)]
    return _sheets_page("Corpus", " ".join(inspection.notes), *sheets_of)


def feed_page(feed: FeedRates) -> str:
    """Return the page of the data loading speed of a corpus."""
    sheets_of = [*_corpus_sheets(feed.corpus), data_sheets.rate_sheet(feed)]
    return _sheets_page("Data loading speed", " ".join(feed.notes), *sheets_of)


def _corpus_sheets(corpus: CorpusFacts) -> list[sheets.Sheet]:
    counts = [data_sheets.label_sheet(corpus), data_sheets.tag_sheet(corpus)]
    every = [data_sheets.corpus_sheet(corpus), *counts, data_sheets.skipped_sheet(corpus)]
    return [sheet for sheet in every if sheet.rows]


def sheets_page(title: str, shown: Sequence[sheets.Sheet]) -> str:
    """Return a page of tables. Empty tables are left out."""
    return _sheets_page(title, "", *(sheet for sheet in shown if sheet.rows))


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis."""
    found = diagnosis_sheets.sheets_of(diagnosis)
    said = (diagnosis_sheets.headline(diagnosis), diagnosis_sheets.growth_sentence(diagnosis), *diagnosis.notes)
    return _page(
        "diagnosis",
        diagnosis=diagnosis,
        sentences=[*filter(None, said)],
        bars=_bars(diagnosis.shares),
        sheets=found,
        plotly_js=None,
    )


@dataclass(frozen=True)
class Bar:
    """One category of memory at the peak, drawn as a bar.

    ``share`` is the share of the peak, from 0 to 1. ``colour`` is the name of a CSS variable of the page.
    """

    category: str
    share: float
    text: str
    place: str
    colour: str


def _bars(shares: Sequence[Share]) -> list[Bar]:
    """Return a bar for each category of memory at the peak; empty if the categories have 0 bytes in total."""
    total_bytes = sum(share.num_bytes for share in shares)
    return [
        Bar(
            category=share.category,
            share=min(max(share.num_bytes / total_bytes, 0.0), 1.0),
            text=f"{format_bytes(share.num_bytes)}, {share.num_bytes / total_bytes:.0%} ({share.known})",
            place=share.place,
            colour=share.category.replace(" ", "-") if share.category in CATEGORIES else "accent",
        )
        for share in shares
        if total_bytes > 0
    ]


def plan_page(plan: Plan) -> str:
    """Return the page of a plan."""
    prediction = plan.prediction
    charts = [fallback_chart(plan), *([prediction_chart(prediction)] if prediction else [])]
    sentences = [plan_sheets.headline(plan), plan_sheets.plain_sentence(plan), plan_sheets.alternative_sentence(plan)]
    if prediction:
        sentences += prediction_sheets.moment_sentences(prediction)
        sentences += prediction_sheets.exchange_sentences(prediction)
    return _page(
        "plan",
        subject=prediction.subject if prediction else "Plan",
        verdict=plan_sheets.verdict(plan),
        sentences=[*filter(None, sentences)],
        key_numbers=plan_sheets.key_numbers(plan),
        constraints=[
            plan_sheets.budget_sentence(plan.budget),
            plan_sheets.loss_sentence(plan),
            plan_sheets.off_device_sentence(plan),
            plan_sheets.preparing_sentence(plan),
            plan_sheets.trial_sentence(plan),
            plan_sheets.constraints_sentence(plan),
        ],
        charts={chart.key: chart for chart in charts},
        plotly_js=_drawn_by(charts),
        chosen=plan_sheets.chosen_sheet(plan),
        fallback_schedule=plan_sheets.fallback_sheet(plan),
        trial=plan_sheets.trial_sheet(plan),
        lossy_alternatives=plan_sheets.alternative_sheet(plan),
        rejected=plan_sheets.rejected_sheet(plan, plan_sheets.MOST_REJECTED),
        more_rejected=_more_rejected(plan),
        parts_at_peak=prediction_sheets.part_sheet(prediction) if prediction else None,
        largest=prediction_sheets.largest_sheet(prediction) if prediction else None,
        assumptions=prediction_sheets.assumption_sheet(prediction) if prediction else None,
        made_for=plan_sheets.made_for_sheet(plan),
        versions=sheets.version_sheet(prediction.versions if prediction else {}),
    )


def placement_page(plan: InferencePlan) -> str:
    """Return the page of an inference plan."""
    said = (placement_sheets.headline(plan), *placement_sheets.sentences(plan))
    numbers = sheets.Sheet("", sheets.columns_of("Property", "Value"), placement_sheets.key_numbers(plan))
    shown = (numbers, *placement_sheets.sheets_of(plan), sheets.version_sheet(plan.versions))
    return _sheets_page(plan.model, " ".join(said), *shown)


def shrink_page(record: ShrinkRecord) -> str:
    """Return the page of a model that was made smaller."""
    chart = front_chart(record)
    return _page(
        "shrink",
        subject=record.model,
        sentence=shrink_sheets.headline(record),
        charts={chart.key: chart},
        plotly_js=plotly_js(),
        sheets=(*shrink_sheets.shrink_sheets(record), sheets.version_sheet(record.versions)),
    )


def watch_page(record: WatchRecord) -> str:
    """Return the page of a recording of ``plimsoll watch``."""
    charts = watch_charts(record)
    return _page(
        "watch",
        subject=record.subject,
        sentences=watch_sheets.sentences(record),
        charts=charts,
        plotly_js=_drawn_by(charts),
        sheets=watch_sheets.sheets_of(record),
    )


def _more_rejected(plan: Plan) -> sheets.Sheet | None:
    if len(plan.rejected) <= plan_sheets.MOST_REJECTED:
        return None
    return plan_sheets.rejected_sheet(plan, plan_sheets.MOST_REJECTED_FOLDED)


def _sheets_page(title: str, sentence: str, *shown: sheets.Sheet) -> str:
    return _page("sheets", title=title, sentence=sentence, sheets=shown)


def _page(template: str, **shown: Any) -> str:
    return environment().get_template(f"{template}.html").render(**shown)


def _drawn_by(charts: Iterable[Chart]) -> str | None:
    """Return the plotly script if a chart has data, otherwise ``None``."""
    return plotly_js() if any(chart.figure for chart in charts) else None


PAGES: dict[type[Record], Callable[[Any], str]] = {
    RunRecord: run_page,
    RunComparison: comparison_page,
    Machine: machine_page,
    Device: device_page,
    Plan: plan_page,
    Prediction: prediction_page,
    Diagnosis: diagnosis_page,
    CorpusFacts: corpus_page,
    TokenFacts: token_page,
    Inspection: inspection_page,
    FeedRates: feed_page,
    Strategies: lambda record: sheets_page("Fine-tuning strategies", strategy_sheets.page_sheets(record)),
    InferencePlan: placement_page,
    ShrinkRecord: shrink_page,
    WatchRecord: watch_page,
}
