"""Sheets of inference on a file, shared by the terminal and the HTML page."""

from __future__ import annotations

from plimsoll.records.apply import ApplyFacts
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.sheets import FACTS, Sheet, columns_of, oom_sheet


def apply_sheets(facts: ApplyFacts) -> tuple[Sheet, ...]:
    """Return a sheet of rows, a sheet of passes, and sheets of failed rows and out-of-memory errors, if any."""
    sheets = [_rows_sheet(facts), _passes_sheet(facts)]
    if facts.faults:
        title = f"Rows without a result, {len(facts.faults):,} of {facts.num_faults:,}"
        sheets.append(Sheet(title, columns_of("Row and reason"), tuple((fault,) for fault in facts.faults)))
    if facts.oom_events:
        sheets.append(oom_sheet(facts.oom_events))
    return tuple(sheets)


def _rows_sheet(facts: ApplyFacts) -> Sheet:
    limit = "none" if facts.longest_tokens is None else f"to {facts.longest_tokens:,} tokens"
    rows = [
        ("Rows", f"{facts.num_rows:,}"),
        ("Without a result", f"{facts.num_faults:,}" if facts.num_faults else "none"),
        ("Truncated", f"{facts.num_truncated:,}, {limit}" if facts.num_truncated else "none"),
        ("Tokens", f"{facts.num_tokens:,}"),
        ("Output", facts.output),
    ]
    if facts.first_row:
        rows.insert(1, ("Done earlier", f"{facts.first_row:,} of them"))
    return Sheet(f"{facts.task} with {facts.model} on {facts.data}", FACTS, tuple(rows))


def _passes_sheet(facts: ApplyFacts) -> Sheet:
    rows = [
        ("Device", f"{facts.device}, {facts.dtype}"),
        ("Budget", "none" if facts.budget_bytes is None else format_bytes(facts.budget_bytes)),
        ("Peak", "unknown" if facts.peak_bytes is None else format_bytes(facts.peak_bytes)),
        ("Passes", f"{facts.num_passes:,} of up to {facts.tokens_per_pass:,} tokens, {facts.rows_per_pass:,} rows"),
        ("Padding", _share(facts.num_padded_tokens - facts.num_new_tokens, facts.num_padded_tokens)),
        ("OOM events", f"{len(facts.oom_events):,}, survived" if facts.oom_events else "none"),
        ("Loading", format_seconds(facts.load_seconds)),
        ("Time", f"{format_seconds(facts.seconds)}{_rates(facts)}"),
    ]
    return Sheet("Passes", FACTS, tuple(rows))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} of the tokens computed" if whole else "none"


def _rates(facts: ApplyFacts) -> str:
    if not facts.num_new_rows or not facts.seconds:
        return ""
    rows_per_second, tokens_per_second = facts.num_new_rows / facts.seconds, facts.num_new_tokens / facts.seconds
    return f", {rows_per_second:,.1f} rows/s, {tokens_per_second:,.0f} tokens/s"
