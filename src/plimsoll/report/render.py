"""Any record as text, JSON or HTML: one table says which.

Text is plain and 80 columns wide (the command line prints the coloured tables of `as_text` itself), JSON is the
record's own file format, HTML is one self-contained file. Adding a record here is one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import RenderableType

from plimsoll.errors import InputError, RecordError
from plimsoll.records.apply import ApplyFacts
from plimsoll.records.base import Record
from plimsoll.records.cache import CacheContents
from plimsoll.records.corpus import CorpusFacts, FeedRates, Inspection, TokenFacts
from plimsoll.records.device import Device, Machine
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.embeddings import CompressionFacts, Conversion, SubsetFacts, VectorFile
from plimsoll.records.lint import LintReport
from plimsoll.records.placement import InferencePlan
from plimsoll.records.plan import Plan
from plimsoll.records.prediction import Prediction
from plimsoll.records.run import RunRecord
from plimsoll.records.run_comparison import RunComparison
from plimsoll.records.shrink import ShrinkRecord
from plimsoll.records.strategies import Strategies
from plimsoll.records.watch import WatchRecord, is_recording
from plimsoll.report import (
    apply_sheets,
    as_html,
    as_text,
    cache_sheets,
    embedding_sheets,
    lint_formats,
    strategy_sheets,
)
from plimsoll.report.sheets import Sheet

Format = Literal["text", "json", "html"]

Screen = tuple[Callable[[Any], RenderableType], Callable[[Any], str]]

_VECTORS = "Word vectors"


def _of_sheets(title: str, sheets_of: Callable[[Any], tuple[Sheet, ...]]) -> Screen:
    """Return the screens of a record that is nothing but sheets."""
    return (
        lambda record: as_text.sheets_report(sheets_of(record)),
        lambda record: as_html.sheets_page(title, sheets_of(record)),
    )


# record -> (rich renderable, HTML page)
_SCREENS: dict[type[Record], Screen] = {
    RunRecord: (as_text.run_report, as_html.run_page),
    RunComparison: (as_text.comparison_report, as_html.comparison_page),
    Machine: (as_text.machine_report, as_html.machine_page),
    Device: (as_text.device_table, as_html.device_page),
    Plan: (as_text.plan_report, as_html.plan_page),
    Prediction: (as_text.prediction_report, as_html.prediction_page),
    Diagnosis: (as_text.diagnosis_report, as_html.diagnosis_page),
    CorpusFacts: (as_text.corpus_report, as_html.corpus_page),
    TokenFacts: (as_text.token_report, as_html.token_page),
    Inspection: (as_text.inspection_report, as_html.inspection_page),
    FeedRates: (as_text.feed_report, as_html.feed_page),
    SubsetFacts: _of_sheets(_VECTORS, embedding_sheets.subset_sheets),
    VectorFile: _of_sheets(_VECTORS, embedding_sheets.vector_file_sheets),
    Conversion: _of_sheets(_VECTORS, embedding_sheets.conversion_sheets),
    CompressionFacts: _of_sheets(_VECTORS, embedding_sheets.compression_sheets),
    Strategies: (
        as_text.strategies_report,
        lambda strategies: as_html.sheets_page("Ways to train", strategy_sheets.page_sheets(strategies)),
    ),
    InferencePlan: (as_text.placement_report, as_html.placement_page),
    ShrinkRecord: (as_text.shrink_report, as_html.shrink_page),
    WatchRecord: (as_text.watch_report, as_html.watch_page),
    ApplyFacts: _of_sheets("Results", apply_sheets.apply_sheets),
    CacheContents: _of_sheets("Cache", cache_sheets.cache_sheets),
    LintReport: _of_sheets("Lint", lint_formats.lint_sheets),
}


def load(path: Path) -> Record:
    """Read a record of any kind that has a report from its file.

    Raises:
        RecordError: if the file cannot be read or holds no such record.
    """
    if is_recording(path):
        return WatchRecord.read(path)
    kinds = {kind.record_kind: kind for kind in _SCREENS}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path} as a record ({error}): give a JSON file that --json wrote") from None
    name = found.get("record") if isinstance(found, dict) else None
    if name not in kinds:
        raise RecordError(
            f"{path} holds a record of kind {name!r}, which has no report: give one of these: {', '.join(kinds)}"
        )
    return kinds[name].load(path)


def render(record: Record, format: Format = "text") -> str:
    """Return a record as something to read.

    Args:
        record: a run, two runs compared, a machine, a device, a plan, a prediction, a diagnosis, an inference plan,
            or one of `plimsoll.records.corpus` and `plimsoll.records.embeddings`.
        format: ``"text"`` (plain, 80 columns), ``"json"`` (the record's file) or ``"html"`` (one page, no network).

    Raises:
        RecordError: if there is no report for this kind of record.
        InputError: if the format is not one of the three.
    """
    if type(record) not in _SCREENS:
        known = ", ".join(kind.record_kind for kind in _SCREENS)
        raise RecordError(f"there is no report for a {type(record).__name__}: give one of these records: {known}")
    if format not in get_args(Format):
        raise InputError(f"cannot render a report as {format!r}: give one of {', '.join(get_args(Format))}")
    if format == "json":
        return record.to_json()
    to_renderable, to_page = _SCREENS[type(record)]
    return to_page(record) if format == "html" else as_text.plain(to_renderable(record))
