"""Rendering of any record as text, JSON or HTML.

Text is plain and 80 columns wide (the command line prints the coloured tables of `as_text`). JSON is the file format of
the record. HTML is one self-contained file. A new kind of record needs a row in one of the tables here. If its page has
more than sheets, it also needs a row in `as_html.PAGES`.
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
from plimsoll.report import apply_sheets, as_text, cache_sheets, embedding_sheets, lint_formats
from plimsoll.report.sheets import Sheet

Format = Literal["text", "json", "html"]

_VECTORS = "Word vectors"

# Records that consist of sheets only, with the title of their page.
_SHEETS: dict[type[Record], tuple[str, Callable[[Any], tuple[Sheet, ...]]]] = {
    SubsetFacts: (_VECTORS, embedding_sheets.subset_sheets),
    VectorFile: (_VECTORS, embedding_sheets.vector_file_sheets),
    Conversion: (_VECTORS, embedding_sheets.conversion_sheets),
    CompressionFacts: (_VECTORS, embedding_sheets.compression_sheets),
    ApplyFacts: ("Results", apply_sheets.apply_sheets),
    CacheContents: ("Cache", cache_sheets.cache_sheets),
    LintReport: ("Lint", lint_formats.lint_sheets),
}
# All other records, with the function that returns their text; `as_html.PAGES` has their pages.
_TEXTS: dict[type[Record], Callable[[Any], RenderableType]] = {
    RunRecord: as_text.run_report,
    RunComparison: as_text.comparison_report,
    Machine: as_text.machine_report,
    Device: as_text.device_table,
    Plan: as_text.plan_report,
    Prediction: as_text.prediction_report,
    Diagnosis: as_text.diagnosis_report,
    CorpusFacts: as_text.corpus_report,
    TokenFacts: as_text.token_report,
    Inspection: as_text.inspection_report,
    FeedRates: as_text.feed_report,
    Strategies: as_text.strategies_report,
    InferencePlan: as_text.placement_report,
    ShrinkRecord: as_text.shrink_report,
    WatchRecord: as_text.watch_report,
}
_KINDS = {kind.record_kind: kind for kind in (*_TEXTS, *_SHEETS)}
_FORMER_KINDS = {kind.former_kind: kind for kind in _TEXTS if kind.former_kind}


def load(path: Path) -> Record:
    """Read a record of any kind from its file.

    Raises:
        RecordError: if the file cannot be read, or holds no record with a report.
    """
    if is_recording(path):
        return WatchRecord.read(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path} as a record ({error}): give a JSON file that --json wrote") from None
    name = found.get("record") if isinstance(found, dict) else None
    if name not in {*_KINDS, *_FORMER_KINDS}:
        raise RecordError(
            f"{path} holds a record of kind {name!r}, which has no report: give one of these: {', '.join(_KINDS)}"
        )
    return (_KINDS | _FORMER_KINDS)[name].load(path)


def render(record: Record, format: Format = "text") -> str:
    """Return the report of a record.

    Args:
        record: a run, a run comparison, a machine, a device, a plan, a prediction, a diagnosis, an inference plan,
            or a record of `plimsoll.records.corpus` or `plimsoll.records.embeddings`.
        format: ``"text"`` (plain, 80 columns), ``"json"`` (the file format of the record) or ``"html"`` (one
            self-contained page).

    Returns:
        The report as one string.

    Raises:
        RecordError: if this kind of record has no report.
        InputError: if the format is unknown.
    """
    if type(record) not in _KINDS.values():
        known = ", ".join(_KINDS)
        raise RecordError(f"there is no report for a {type(record).__name__}: give one of these records: {known}")
    if format not in get_args(Format):
        raise InputError(f"cannot render a report as {format!r}: give one of {', '.join(get_args(Format))}")
    if format == "json":
        return record.to_json()
    return _page(record) if format == "html" else as_text.plain(_text(record))


def _text(record: Record) -> RenderableType:
    if type(record) in _TEXTS:
        return _TEXTS[type(record)](record)
    _, sheets_of = _SHEETS[type(record)]
    return as_text.sheets_report(sheets_of(record))


def _page(record: Record) -> str:
    from plimsoll.report import as_html  # imported late: text needs neither jinja2 nor plotly

    if type(record) in as_html.PAGES:
        return as_html.PAGES[type(record)](record)
    title, sheets_of = _SHEETS[type(record)]
    return as_html.sheets_page(title, sheets_of(record))
