"""Comma- or tab-separated values: a text is one column, or several joined by newlines.

A row ends at a newline outside quotes. With ``quotes=False``, a row ends at every newline. Quotes follow the rules of
Python's strict `csv` reader, which decodes the rows: a quote is special only at the beginning of a field, and an
ordinary character inside an unquoted field. Quoted fields may contain newlines. A row must have as many fields as the
first row. Every row is decoded during indexing, so that faults are found before training starts. Empty lines are not
rows.

Not handled: separators other than the comma (.csv) and the tab (.tsv), and backslashes before quotes. If a quote opens
a field and is never closed, the field includes the rows after it, which is a fault.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats import Fault, Found, Layout, Part, Reading
from plimsoll.data.formats.helpers.columns import NO_LABEL, Row, found_rows, listed, text_columns
from plimsoll.data.formats.helpers.records import HEAD_BYTES, read_rows, too_long
from plimsoll.data.formats.helpers.scanning import NEWLINE, RETURN, fault_in, opened, read_head, text_begin
from plimsoll.errors import DataError

_QUOTE = ord('"')
_REMEDY = "correct the row"
_FEWEST_SWALLOWED = 2  # lines; a text may well contain a single line that looks like a row
_HOW_TO_QUOTE = (
    " (a quote in a field is written twice, in a field with quotes around it), or set quotes: false if quotes are "
    "ordinary characters in this file"
)
_ESCAPE = re.compile(r"\\([ntr\\])")
_MEANT = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_ROWS_AT_ONCE = 256
# The state of quoting at a byte: outside quotes, inside, or outside with a quote at this byte opening a field. The last
# applies at the beginning of the file and after a closing quote, because a doubled quote stands for one quote in the
# field.
OUTSIDE, QUOTED, OPENS = range(3)


def look(path: str, reading: Reading) -> tuple[Layout, int]:
    """Return the layout of a file: its columns, and whether the first row names them."""
    begin, delimiter = text_begin(path), "\t" if path.lower().endswith(".tsv") else ","
    layout = Layout("csv", delimiter=delimiter, escapes=reading.escapes, quotes=reading.quotes)
    first, second = _first_rows(read_head(path, HEAD_BYTES), begin, layout)
    if second is None:  # the file ends here, or its rows are long
        first, second = _first_rows(read_head(path, reading.max_text_bytes + HEAD_BYTES), begin, layout)
    if first is None:
        return layout, begin
    end, names = first
    numbered = [str(number) for number in range(1, len(names) + 1)]
    has_header = _has_header(names, numbered, reading)
    columns, example = (names, second or []) if has_header else (numbered, names)
    strings = [name for name, cell in zip(columns, example, strict=False) if not _is_number(cell)]
    chosen = text_columns(reading, columns, strings)
    _require_one_each((*chosen, *filter(None, [reading.label])), columns)
    layout = layout._replace(
        columns=tuple(map(columns.index, chosen)),
        label=None if reading.label is None else columns.index(reading.label),
        num_columns=len(columns),
    )
    return layout, end if has_header else begin


def _first_rows(head: bytes, begin: int, layout: Layout) -> tuple[tuple[int, list[str]] | None, list[str] | None]:
    """Return the end offset and the fields of the first row, and the fields of the second row.

    A row that is missing is ``None``.
    """
    rows: list[tuple[int, list[str]]] = []
    borders = [begin, *(_row_ends(head, layout, begin, OPENS) + 1).tolist()]
    for start, end in pairwise([*borders, len(head)]):
        raw = head[start:end].strip(b"\r\n")
        if raw and len(rows) < 2:
            try:
                rows.append((end, fields_of([raw.decode("utf-8")], layout)[0]))
            except (ValueError, csv.Error) as error:
                if not rows:
                    remedy = _HOW_TO_QUOTE if b'"' in raw else ""
                    raise DataError(f"its first row is not csv ({_said(error)}): correct the row{remedy}") from None
    return rows[0] if rows else None, rows[1][1] if len(rows) > 1 else None


def _has_header(first: list[str], numbered: list[str], reading: Reading) -> bool:
    asked = [*(reading.columns or ()), *filter(None, [reading.label])]
    if reading.header is not None:
        return reading.header
    if (asked and all(name in first for name in asked)) or (reading.columns is None and "text" in first):
        return True
    if any(map(_is_number, first)) or (asked and all(name in numbered for name in asked)):
        return False
    if asked:
        return True  # a requested name is missing: the error lists the existing names
    raise DataError(
        f"it is unclear whether its first row ({listed(first)}) names the columns: set header: true or header: false, "
        "or give text: <column>"
    )


def _require_one_each(names: Sequence[str], columns: list[str]) -> None:
    for name in names:
        if columns.count(name) > 1:
            numbers = ", ".join(str(number) for number, column in enumerate(columns, 1) if column == name)
            raise DataError(
                f"{columns.count(name)} of its columns ({numbers}) are called {name!r}, so the name is ambiguous, "
                "and columns have no numbers if the first row names them: rename all but one in the first row"
            )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def quoting_after(part: Part) -> int:
    """Return the quoting state at the beginning of the part after ``part``: `OUTSIDE`, `QUOTED` or `OPENS`."""
    offset = max(part.begin - 1, 0)
    with opened(part.path) as descriptor:
        view = np.frombuffer(os.pread(descriptor, part.end - offset, offset), np.uint8)
    return _quotes(view, part.layout, *_begin(part, offset))[1]


def quoting_after_line(line: bytes, layout: Layout, quoting: int) -> int:
    """Return the quoting state after a line without its newline; ``quoting`` is the state at its beginning."""
    after = _quotes(np.frombuffer(line, np.uint8), layout, 0, quoting)[1]
    return QUOTED if after == QUOTED else OPENS


def _begin(part: Part, offset: int) -> tuple[int, int]:
    """Return the index of the first byte to scan in the bytes read from ``offset`` on, and the quoting state there."""
    if part.begin > part.first:
        return part.begin - offset, part.quoting
    return min(part.first, part.end) - offset, OPENS


def _quotes(view: NDArray[np.uint8], layout: Layout, begin: int, quoting: int) -> tuple[NDArray[np.int64], int]:
    """Return the indices of the quotes that open or close a field, and the quoting state after the last byte.

    A doubled quote, which stands for one quote, counts as closing the field and opening it again.
    """
    quotes: NDArray[np.int64] = (view[begin:] == _QUOTE).nonzero()[0] + begin
    before = view[quotes - 1]  # for a quote at index 0 this wraps to the last byte; `quoting` decides there
    begins_field = (before == NEWLINE) | (before == RETURN) | (before == ord(layout.delimiter))
    is_doubled = np.diff(quotes, prepend=-2) == 1
    if len(quotes) and quotes[0] == begin:
        begins_field[0] |= quoting == OPENS
        begins_field[0] &= begin > 0 or quoting == OPENS
    is_quoted = quoting == QUOTED
    if not (begins_field | is_doubled)[int(is_quoted) :: 2].all():
        quotes = quotes[_meaningful(quotes, begins_field, is_quoted)]
    is_quoted ^= len(quotes) % 2 == 1
    ends_with_quote = len(quotes) > 0 and int(quotes[-1]) == len(view) - 1
    if len(view) <= begin:
        return quotes, quoting
    return quotes, QUOTED if is_quoted else OPENS if ends_with_quote else OUTSIDE


def _meaningful(quotes: NDArray[np.int64], begins_field: NDArray[np.bool_], is_quoted: bool) -> NDArray[np.bool_]:
    """Return whether each quote opens or closes a field, and is not an ordinary character."""
    are_meant = np.zeros(len(quotes), np.bool_)
    closed_at = -1
    for number, (place, may_open) in enumerate(zip(quotes.tolist(), begins_field.tolist(), strict=True)):
        if is_quoted:
            closed_at = place
        elif not (may_open or place - 1 == closed_at):
            continue
        is_quoted = not is_quoted
        are_meant[number] = True
    return are_meant


def scan(part: Part) -> Found:
    """Find the rows that begin in a part; see `plimsoll.data.formats.Format`."""
    offset = max(part.begin - 1, 0)

    last = part.end - 1 - offset

    def is_whole(raw: bytes) -> bool:
        ends = _row_ends(raw, part.layout, *_begin(part, offset))
        begins_none = part.begin > part.first and (not len(ends) or ends[0] >= last)
        return begins_none or bool(len(ends) and ends[-1] >= last)

    raw, offset, digest = read_rows(part, is_whole)
    num_lines = raw.count(b"\n", part.begin - offset, part.end - offset)
    spans = _spans(part, raw, offset)
    found = found_rows(part, digest, num_lines, _rows(part, raw, offset, spans))
    return found._replace(suspects=tuple(_suspects(part, raw, offset, spans)))


def _row_ends(raw: bytes, layout: Layout, begin: int, quoting: int) -> NDArray[np.int64]:
    """Return the indices of the newlines outside quotes, given the quoting state at the byte ``begin``."""
    view = np.frombuffer(raw, np.uint8)
    newlines: NDArray[np.int64] = (view == NEWLINE).nonzero()[0]
    if not layout.quotes:
        return newlines
    quotes, _ = _quotes(view, layout, begin, quoting)
    newlines = newlines[(np.searchsorted(quotes, newlines) + (quoting == QUOTED)) % 2 == 0]
    return newlines


def _spans(part: Part, raw: bytes, offset: int) -> list[tuple[int, int]]:
    """Return the spans of the rows that begin in a part, as indices into the bytes read."""
    ends = _row_ends(raw, part.layout, *_begin(part, offset)).tolist()
    if part.begin <= part.first:
        begins = [part.first - offset, *(end + 1 for end in ends if end >= part.first - offset)]
    else:
        begins = [end + 1 for end in ends]
    last = part.end - offset
    borders = [begin for begin in begins if begin < last]
    spans = list(pairwise([*borders, next((begin for begin in begins if begin >= last), len(raw))])) if borders else []
    return [(begin, end) for begin, end in spans if raw[begin:end].strip(b"\r\n")]


def _suspects(part: Part, raw: bytes, offset: int, spans: list[tuple[int, int]]) -> Iterator[Fault]:
    """Yield rows whose quotes may join several rows by mistake: each of their inner lines would be a valid row.

    Tables of one column are not checked, because any line would be a valid row.
    """
    layout = part.layout
    if layout.num_columns < 2 or raw.count(b"\n") <= len(spans) + 1:
        return
    for begin, end in spans:
        lines = raw[begin:end].rstrip(b"\r\n").split(b"\n")[1:-1]
        if len(lines) >= _FEWEST_SWALLOWED and all(_is_row(line.removesuffix(b"\r"), layout) for line in lines):
            why = f"a quoted field takes the {len(lines)} lines after it, each of which would be a row by itself"
            remedy = "see whether its quotes are intended" + _HOW_TO_QUOTE
            yield Fault(offset + begin, why, remedy, raw.count(b"\n", part.begin - offset, begin))


def _is_row(line: bytes, layout: Layout) -> bool:
    if line.count(layout.delimiter.encode()) < layout.num_columns - 1:
        return False
    try:
        (fields,) = fields_of([line.decode("utf-8")], layout)
    except (ValueError, csv.Error):
        return False
    return len(fields) == layout.num_columns


def _rows(part: Part, raw: bytes, offset: int, spans: list[tuple[int, int]]) -> Iterator[Row | Fault]:
    line = raw.count(b"\n", part.begin - offset, spans[0][0]) if spans else 0
    for number in range(0, len(spans), _ROWS_AT_ONCE):
        some = spans[number : number + _ROWS_AT_ONCE]
        yield from _rows_of(part, raw, offset, some, line)
        following = spans[number + _ROWS_AT_ONCE][0] if number + _ROWS_AT_ONCE < len(spans) else len(raw)
        line += raw.count(b"\n", some[0][0], following)


def _rows_of(part: Part, raw: bytes, offset: int, spans: list[tuple[int, int]], line: int) -> Iterator[Row | Fault]:
    """Yield the byte offset, text and label of each row, or its fault.

    Rows are decoded one by one only if one of them is faulty.
    """
    layout = part.layout
    raws = [raw[begin:end].strip(b"\r\n") for begin, end in spans]
    rows = _faultless(raws, part)
    if rows is None:
        for (begin, _), row in zip(spans, raws, strict=True):
            yield _checked(row, offset + begin, line + raw.count(b"\n", spans[0][0], begin), part)
        return
    for (begin, _), fields in zip(spans, rows, strict=True):
        yield offset + begin, text_of(fields, layout), _label(fields, layout)


def _faultless(raws: list[bytes], part: Part) -> list[list[str]] | None:
    """Return the fields of some rows, or ``None`` if one of them has a fault."""
    if any(b"\0" in row or len(row) > part.max_text_bytes for row in raws):
        return None
    try:
        rows = fields_of([row.decode("utf-8") for row in raws], part.layout)
    except (ValueError, csv.Error):
        return None
    if any(_label(row, part.layout) == NO_LABEL for row in rows if len(row) == part.layout.num_columns):
        return None
    return rows if all(len(row) == part.layout.num_columns for row in rows) else None


def _checked(raw: bytes, at: int, line: int, part: Part) -> Row | Fault:
    if len(raw) > part.max_text_bytes:
        return too_long(at, len(raw), part.max_text_bytes, line)
    if (fault := fault_in(raw, at)) is not None:
        return fault._replace(at=at, line=line)
    try:
        (fields,) = fields_of([raw.decode("utf-8")], part.layout)
    except (ValueError, csv.Error) as error:
        num_more = raw.count(b"\n")
        why = f"it is not csv ({_said(error)})"
        if num_more:
            why = f"a quote in it that is not closed takes the {num_more} lines after it into the same row"
        return Fault(at, why, _REMEDY + (_HOW_TO_QUOTE if b'"' in raw else ""), line)
    if len(fields) != part.layout.num_columns:
        why = f"it has {len(fields)} fields where the first row has {part.layout.num_columns}"
        return Fault(at, why, _REMEDY, line)
    if _label(fields, part.layout) == NO_LABEL:
        return Fault(at, f"its label is {NO_LABEL}, which means no label", "give it one, or leave the row out", line)
    return at, text_of(fields, part.layout), _label(fields, part.layout)


def fields_of(rows: list[str], layout: Layout) -> list[list[str]]:
    """Return the fields of each row.

    Raises:
        ValueError: if a row has a quote that is not closed.
        csv.Error: if Python's reader rejects a row.
    """
    if not layout.quotes:
        return [row.split(layout.delimiter) for row in rows]
    with _long_fields():
        fields = list(csv.reader(rows, delimiter=layout.delimiter, strict=True))
    if len(fields) != len(rows):
        raise ValueError("a quote is not closed")
    return fields


def _said(error: Exception) -> str:
    return "a return in a field without quotes" if str(error).startswith("new-line character") else str(error)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the process-wide limit of 128 KiB per field of Python's csv reader inside the block."""
    limit = csv.field_size_limit(1 << 40)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def text_of(fields: list[str], layout: Layout) -> str:
    """Return the text of a row, given its fields."""
    text = "\n".join([fields[int(number)] for number in layout.columns])
    return _ESCAPE.sub(lambda match: _MEANT[match[1]], text) if layout.escapes else text


def _label(fields: list[str], layout: Layout) -> Any:
    return None if layout.label is None else fields[int(layout.label)]


def decode(raws: list[bytes], layout: Layout) -> list[str]:
    """Return the texts of some rows, given their bytes; see `plimsoll.data.formats.Format`."""
    try:
        rows = fields_of([raw.decode("utf-8").strip("\r\n") for raw in raws], layout)
        return [text_of(row, layout) for row in rows]
    except (csv.Error, IndexError) as error:
        raise ValueError(str(error)) from None


def decode_run(raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
    """Return consecutive texts from one bytes object; see `plimsoll.data.formats.Format`."""
    return decode([raw[begin:end] for begin, end in pairwise(borders.tolist())], layout)
