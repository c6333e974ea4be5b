"""HTML fragments of records for notebooks: the most important tables, without scripts and charts.

A fragment has a few kB, whereas a page with plotly has over 1 MB. The notebook sets colours and font. Runs,
comparisons, plans, predictions and diagnoses have a fragment; other records are shown as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plimsoll.records.base import Record
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.plan import Plan
from plimsoll.records.prediction import Prediction
from plimsoll.records.run import RunRecord
from plimsoll.records.run_comparison import RunComparison
from plimsoll.report import comparison_sheets, diagnosis_sheets, plan_sheets, prediction_sheets, sheets
from plimsoll.report._templates import environment

Told = tuple[str, str, Sequence[sheets.Sheet]]  # title, sentence and tables; the first table is unfolded


def notebook_html(record: Record) -> str | None:
    """Return a record as an HTML fragment; ``None`` if this kind of record has no fragment."""
    if type(record) not in _TOLD:
        return None
    title, sentence, shown = _TOLD[type(record)](record)
    return (
        environment()
        .get_template("notebook.html")
        .render(title=title, sentence=sentence, sheets=[sheet for sheet in shown if sheet.rows])
    )


def _numbers(numbers: tuple[tuple[str, str], ...]) -> sheets.Sheet:
    return sheets.Sheet("Key numbers", sheets.columns_of("Property", "Value"), numbers)


def _run(record: RunRecord) -> Told:
    shown = (_numbers(sheets.key_numbers(record)), sheets.oom_sheet(record.oom_events), sheets.step_sheet(record))
    return f"{record.name}: {record.status}", sheets.line_sentence(record), shown


def _plan(plan: Plan) -> Told:
    shown = (plan_sheets.fallback_sheet(plan), plan_sheets.chosen_sheet(plan), _numbers(plan_sheets.key_numbers(plan)))
    return "Plan", plan_sheets.headline(plan), shown


def _prediction(prediction: Prediction) -> Told:
    shown = (prediction_sheets.part_sheet(prediction), prediction_sheets.largest_sheet(prediction))
    return prediction.subject, prediction_sheets.verdict_sentence(prediction), shown


def _diagnosis(diagnosis: Diagnosis) -> Told:
    return diagnosis.subject, diagnosis_sheets.headline(diagnosis), diagnosis_sheets.sheets_of(diagnosis)


def _comparison(comparison: RunComparison) -> Told:
    title = " and ".join(comparison_sheets.labels(comparison))
    return title, comparison_sheets.headline(comparison), comparison_sheets.sheets_of(comparison)


_TOLD: dict[type[Record], Callable[[Any], Told]] = {
    RunRecord: _run,
    Plan: _plan,
    Prediction: _prediction,
    Diagnosis: _diagnosis,
    RunComparison: _comparison,
}
