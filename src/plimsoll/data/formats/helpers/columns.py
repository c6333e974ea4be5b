"""The choice of the text and label columns of a table, and the checks of its rows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from plimsoll.data.formats import Fault, Found, Labels, Part, Reading
from plimsoll.errors import DataError

MOST_LABELS = 10_000  # a column with more distinct values is unlikely to hold classes
NO_LABEL = "-100"  # losses of torch ignore it: it marks a text without a class and is not a class itself
WORDS_NAMES = ("tokens", "words")  # the usual names of the column of words if they have tags
_MOST_COLUMNS_SHOWN = 20


def text_columns(reading: Reading, columns: Sequence[str], of_strings: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns that make up the text.

    Args:
        reading: the requested columns.
        columns: the names of all columns of the table.
        of_strings: the names of all columns that hold strings.

    Raises:
        DataError: if a requested column is missing, or if no column was requested and the text column is ambiguous.
    """
    for name in (*(reading.columns or ()), *filter(None, [reading.label])):
        if name not in columns:
            raise DataError(no_column(name, columns))
    if reading.columns is not None:
        return reading.columns
    if "text" in columns:
        return ("text",)
    candidates = [name for name in of_strings if name != reading.label]
    if len(candidates) != 1:
        raise DataError(
            f"none of its columns {listed(columns)} is called text, and {len(candidates) or 'none'} of them could be "
            f"the text; give one with text: <column>"
        )
    return (candidates[0],)


def no_column(name: str, columns: Sequence[str]) -> str:
    """Return the message that the column ``name`` is missing, with the columns of similar names."""
    near = difflib.get_close_matches(name, columns, 3)
    meant = f"did you mean {' or '.join(map(repr, near))}? It has" if near else "it has"
    return f"there is no column {name!r}: {meant} {listed(columns)}; give one of them"


def refuse_unknown(names: Sequence[str], known: Sequence[str], what: str, of_training: str) -> None:
    """Raise if ``names``, the labels of the validation data, contain labels that are not in ``known``.

    The message has the form "``what`` <unknown labels>, but ``of_training`` only <known labels>".

    Raises:
        DataError: if a label is unknown.
    """
    if unknown := [name for name in names if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise DataError(
            f"{what} {listed(unknown)}, but {of_training} only {listed(known)}: name them alike{meant}, or leave these "
            "texts out"
        )


def listed(columns: Sequence[str]) -> str:
    """Return names as a quoted list for a message, shortened if there are many."""
    more = f" and {len(columns) - _MOST_COLUMNS_SHOWN} more" if len(columns) > _MOST_COLUMNS_SHOWN else ""
    return ", ".join(map(repr, columns[:_MOST_COLUMNS_SHOWN])) + more


Row = tuple[int, str, Any]  # the byte offset, text and label of a row


def found_rows(part: Part, digest: bytes, num_lines: int, rows: Iterable[Row | Fault]) -> Found:
    """Return the result of scanning a part of a table, given its rows and faults.

    Faults and rows with an empty text are marked as empty texts. ``digest`` is the hash of the bytes of the part.
    """
    starts, faults, codes, are_empty = [], [], [], []
    numbers: dict[Any, int] = {}
    for row in rows:
        if isinstance(row, Fault):
            faults.append(row)
        at, text, label = (row.at, "", None) if isinstance(row, Fault) else row
        starts.append(at)
        are_empty.append(not text)
        codes.append(numbers.setdefault(label, len(numbers)) if text else 0)
    labels = None if part.layout.label is None else Labels(list(numbers), np.array(codes, np.uint32))
    return Found(
        np.array(starts, np.int64),
        digest,
        tuple(faults),
        num_lines,
        is_blank=all(are_empty),
        is_empty=np.array(are_empty, np.bool_),
        labels=labels,
    )
