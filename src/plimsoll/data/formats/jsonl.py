"""JSON lines (jsonl, ndjson): each line is one JSON object, and a text is one or several of its fields.

Several fields are joined by newlines. Every line is parsed during indexing, so that faults are found before training
starts. Lines of white space are not rows. Not handled: nested fields, and objects over several lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats import Fault, Found, Layout, Part, Reading
from plimsoll.data.formats.helpers.columns import NO_LABEL, Row, found_rows, listed, no_column, text_columns
from plimsoll.data.formats.helpers.records import HEAD_BYTES, read_rows, too_long
from plimsoll.data.formats.helpers.scanning import fault_in, read_head, text_begin
from plimsoll.errors import DataError

_REMEDY = "correct the line"
_parse = json.JSONDecoder().decode


def look(path: str, reading: Reading) -> tuple[Layout, int]:
    """Return the layout with the fields that make up the text: the requested fields, or fields of the first object."""
    begin = text_begin(path)
    columns = reading.columns
    for line in read_head(path, HEAD_BYTES)[begin:].split(b"\n") if columns is None else ():
        try:
            first = _parse(line.decode("utf-8").strip())
        except (ValueError, RecursionError):
            continue
        if isinstance(first, dict):
            columns = columns_of(first, reading)
            break
    return Layout("jsonl", columns=columns or ("text",), label=reading.label), begin


def columns_of(record: dict[str, Any], reading: Reading) -> tuple[str, ...]:
    """Return the fields that make up the text of an object and of similar objects.

    Raises:
        DataError: if a requested field is missing, or if no field was requested and the text field is ambiguous. It is
            also ambiguous if the object has one string field and a list of objects.
    """
    holding = [name for name, value in record.items() if _holds_objects(value)]
    if holding and reading.columns is None and "text" not in record:
        raise DataError(
            f"none of its columns {listed(list(record))} is called text, and {listed(holding)} holds objects, which "
            "may contain the texts; give the column with text: <column>, or write these objects as JSON lines"
        )
    strings = [name for name, value in record.items() if isinstance(value, str)]
    return text_columns(reading, list(record), strings)


def _holds_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, dict) for one in value)


def scan(part: Part) -> Found:
    """Find the rows that begin in a part; see `plimsoll.data.formats.Format`."""
    last = part.end - 1 - max(part.begin - 1, 0)  # a newline from here on ends a row that begins in this part

    def is_whole(raw: bytes) -> bool:
        return raw.find(b"\n", last) >= 0 or (part.begin > part.first and raw.find(b"\n", 0, last) < 0)

    raw, offset, digest = read_rows(part, is_whole)
    num_lines = raw.count(b"\n", part.begin - offset, part.end - offset)
    return found_rows(part, digest, num_lines, _rows(part, raw, offset))


def _rows(part: Part, raw: bytes, offset: int) -> Iterator[Row | Fault]:
    begin = part.first - offset if part.begin <= part.first else raw.find(b"\n") + 1
    if begin == 0 and offset:  # find() returned -1: no line begins in this part
        return
    line_number = raw.count(b"\n", part.begin - offset, begin)
    while begin < part.end - offset:
        end = raw.find(b"\n", begin)
        end = len(raw) if end < 0 else end
        line = raw[begin:end]
        if not line.isspace() and line:
            if len(line) > part.max_text_bytes:
                yield too_long(offset + begin, len(line), part.max_text_bytes, line_number)
            else:
                yield _row(line, offset + begin, line_number, part.layout)
        begin, line_number = end + 1, line_number + 1


def _row(line: bytes, at: int, line_number: int, layout: Layout) -> Row | Fault:
    if (fault := None if line.isascii() else fault_in(line, at)) is not None:
        return fault._replace(line=line_number, at=at, why=fault.why)
    try:
        record = _parse(line.decode("utf-8").strip())
        text = text_of(record, layout)
        if b"\\u" in line:
            text.encode("utf-8")
        return at, text, _label(record, layout)
    except json.JSONDecodeError as error:
        why = f"it is not JSON ({error.msg} at character {error.colno})"
    except UnicodeEncodeError:
        why = "its text has half of a surrogate pair, which is not a character"
    except RecursionError:
        why = "it is nested too deep"
    except DataError as error:
        why = str(error)
    return Fault(at, why, _REMEDY, line_number)


def text_of(record: Any, layout: Layout) -> str:
    """Return the text of an object.

    Raises:
        DataError: if the object has no text. The caller adds the line of the object to the message.
    """
    if isinstance(record, dict) and len(layout.columns) == 1:  # a fast path, because this runs for every row
        text = record.get(layout.columns[0])
        if isinstance(text, str):
            return text
    if not isinstance(record, dict):
        raise DataError(f"it is {kind_of(record)} and not an object: write {{...}}")
    values = [_field(record, str(name)) for name in layout.columns]
    for name, value in zip(layout.columns, values, strict=True):
        if not isinstance(value, str):
            raise DataError(f"its column {name!r} holds {kind_of(value)} and no string: write a string")
    return values[0] if len(values) == 1 else "\n".join(values)


def _label(record: dict[str, Any], layout: Layout) -> str | int | None:
    if layout.label is None:
        return None
    value = _field(record, str(layout.label))
    if not isinstance(value, str | int):
        raise DataError(f"its label {layout.label!r} is {kind_of(value)}: write a string or a whole number")
    if str(value) == NO_LABEL:
        raise DataError(
            f"its label {layout.label!r} is {NO_LABEL}, which means no label: give it one, or leave the line out"
        )
    return str(value).lower() if isinstance(value, bool) else value


def _field(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise DataError(no_column(name, list(record)))
    return record[name]


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words, for messages."""
    kinds = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", list: "a list", str: "text"}
    return kinds.get(type(value), "an object")


def decode(raws: list[bytes], layout: Layout) -> list[str]:
    """Return the texts of some rows, given their bytes; see `plimsoll.data.formats.Format`."""
    try:
        return [text_of(_parse(raw.decode("utf-8").strip()), layout) for raw in raws]
    except (DataError, RecursionError) as error:
        raise ValueError(str(error)) from None


def decode_run(raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
    """Return consecutive texts from one bytes object; see `plimsoll.data.formats.Format`."""
    return decode([raw[begin:end] for begin, end in pairwise(borders.tolist())], layout)
