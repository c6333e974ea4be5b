"""The part of `make gpu` that pages show: the result of each part, and the job under each limit next to the best by
hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._results import table

Row = dict[str, Any]


def readme_part(rows: Sequence[Row], header: Row, parts: Iterable[tuple[str, str]]) -> str:
    """Return Markdown; ``parts`` are names and descriptions, in order."""
    card = f"{header['device']}, torch {header['torch']}, {header['recorded']}"
    lines = [line_of(about, [row for row in rows if row.get("part") == name]) for name, about in parts]
    text = table((card, "as it should be", "not as it should be", "not reached"), filter(None, lines))
    planned = [row for row in rows if row["kind"] == "compared"]
    if not planned:
        return text
    heads = ("GPT-2 124M, 64 x 512 tokens, bf16, inside", "as planned", "s a step", "fastest by hand that fits",
             "s a step", "ratio")  # fmt: skip
    return f"{text}\n\n{table(heads, map(cells_of, sorted(planned, key=lambda row: row['limit_gib'])))}"


def line_of(about: str, rows: Sequence[Row]) -> list[str] | None:
    """Return the cells of a part, or None if it has no result."""
    found = [row for row in rows if row["kind"] in {"check", "left"}]
    if not found:
        return None
    right = sum(row["kind"] == "check" and row["ok"] for row in found)
    wrong = sum(row["kind"] == "check" and not row["ok"] for row in found)
    left = len(found) - right - wrong
    return [about, *(str(number) if number else "" for number in (right, wrong, left))]


def cells_of(row: Row) -> list[str]:
    best = ["none", "", ""]
    if row["best_seconds"] is not None:
        best = [row["best"], f"{row['best_seconds']:.3f}", f"{row['seconds'] / row['best_seconds']:.2f}"]
    return [f"{row['limit_gib']} GiB", row["choices"], f"{row['seconds']:.3f}", *best]
