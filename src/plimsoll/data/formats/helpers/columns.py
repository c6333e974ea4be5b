"""Which columns of a table are the text and the label, and what its rows must hold."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from plimsoll.data.formats import Fault, Found, Labels, Part, Reading
from plimsoll.errors import DataError

MOST_LABELS = 10_000  # a column with more is hardly one of classes, and a model with as many outputs hardly meant
NO_LABEL = "-100"  # what losses of torch leave out: of a text that has no class, and is none itself
WORDS_NAMES = ("tokens", "words")  # what the column of the words is called where they have tags
_MOST_COLUMNS_SHOWN = 20


def text_columns(reading: Reading, columns: Sequence[str], of_strings: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that make up the text.

    Args:
        reading: what was asked for.
        columns: all there are.
        of_strings: those of them that hold strings.

    Raises:
        DataError: if one asked for is missing, or none was asked for and more than one could be it.
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
            f"it; give one with text: <column>"
        )
    return (candidates[0],)


def no_column(name: str, columns: Sequence[str]) -> str:
    """Return the message that a column is missing, with those it could mean."""
    near = difflib.get_close_matches(name, columns, 3)
    meant = f"did you mean {' or '.join(map(repr, near))}? It has" if near else "it has"
    return f"there is no column {name!r}: {meant} {listed(columns)}; give one of them"


def refuse_unknown(names: Sequence[str], known: Sequence[str], what: str, of_training: str) -> None:
    """Refuse labels of the validation data that the training data have not.

    Raises:
        DataError: if there is one; ``what`` has it and ``of_training`` does not.
    """
    if unknown := [name for name in names if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise DataError(
            f"{what} {listed(unknown)}, but {of_training} only {listed(known)}: name them alike{meant}, or leave these "
            "texts out"
        )


def listed(columns: Sequence[str]) -> str:
    """Return the names of some columns for a message."""
    more = f" and {len(columns) - _MOST_COLUMNS_SHOWN} more" if len(columns) > _MOST_COLUMNS_SHOWN else ""
    return ", ".join(map(repr, columns[:_MOST_COLUMNS_SHOWN])) + more


Row = tuple[int, str, Any]  # where it begins, its text, its label


def found_rows(part: Part, digest: bytes, num_lines: int, rows: Iterable[Row | Fault]) -> Found:
    """Join what a part of a table has; rows whose text is empty are left out."""
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
