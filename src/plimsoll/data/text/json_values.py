"""Conversion of JSON files to JSON lines: files with a list of objects, or with several objects in sequence.

The list may be a field of the single object of a file, if it is the only list of objects in it. Other objects are
refused with a remedy, so that no content is left out silently. Examples are objects with several lists, objects with
one list per column, and rows that contain a list.

An object keeps the number of the line in which it begins, so that line numbers in messages are correct. If several
objects begin in one line, each gets its own line. Memory: the longest object. Not handled: lists deeper in an object.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from plimsoll.data.formats import Reading
from plimsoll.data.formats.helpers.columns import WORDS_NAMES, listed
from plimsoll.data.formats.jsonl import kind_of
from plimsoll.errors import DataError
from plimsoll.records.units import format_bytes

_WHITE = " \t\r\n"
_LONGEST_TOKEN = 12  # an escaped surrogate pair, the longest token that the end of the read text may cut
_decode = json.JSONDecoder().raw_decode


def are_lines(head: bytes) -> bool:
    """Return whether a file with this beginning is JSON lines: its first line is an object, and it has more lines.

    Blank lines do not count.
    """
    lines = [line for line in head.removeprefix(codecs.BOM_UTF8).split(b"\n") if line.strip()]
    try:
        return len(lines) > 1 and isinstance(json.loads(lines[0]), dict)
    except (ValueError, RecursionError):
        return False


class Field(NamedTuple):
    """A field of a JSON object. ``kind`` is the type of its value in words.

    If the value is a list, ``num_objects`` is its number of objects, and ``names`` are the fields of the first object.
    """

    kind: str
    is_nested: bool  # it is a list or an object
    num_objects: int = 0
    names: tuple[str, ...] = ()


def fields_of_object(chunks: Iterator[bytes], most_bytes: int) -> dict[str, Field] | None:
    """Return the fields of the single object of a file; ``None`` if the file does not hold exactly one object.

    Args:
        chunks: the bytes of the file.
        most_bytes: the maximum length of a value in bytes.

    Raises:
        DataError: if the file begins with an object that is not JSON or has a field twice; the message does not name
            the file.
    """
    reading = _Reading(chunks, most_bytes)
    if reading.next_character() != "{":
        return None
    fields: dict[str, Field] = {}
    for name in reading.names():
        if name in fields:
            raise reading.fault(f"an object has the field {name!r} twice")
        fields[name] = _field(reading)
    return None if reading.next_character() else fields


def _field(reading: _Reading) -> Field:
    """Return the field for the value that begins here, and move past it."""
    if reading.next_character() != "[":
        value = reading.value()[1]
        return Field(kind_of(value), isinstance(value, dict))
    num_values = num_objects = 0
    names: tuple[str, ...] = ()
    for _ in reading.items("]"):
        value = reading.value()[1]
        num_values += 1
        if isinstance(value, dict):
            num_objects += 1
            names = names or tuple(value)
    return Field(f"a list of {num_values:,}{' objects' if num_objects else ''}", True, num_objects, names)


def json_lines(chunks: Iterator[bytes], most_bytes: int, field: str | None = None) -> Iterator[bytes]:
    """Yield the objects of a file, each with the newlines before it.

    Args:
        chunks: the bytes of the file.
        most_bytes: the maximum length of an object in bytes.
        field: the field of the single object that holds the list; ``None``: the file is a list, or objects in sequence.

    Raises:
        DataError: if the file is not JSON, or an object is longer than ``most_bytes``; the message does not name the
            file.
    """
    reading = _Reading(chunks, most_bytes)
    is_list = reading.next_character() == "["
    if field is not None:
        for name in reading.names():
            if is_list := name == field:
                break
            reading.value()
    line: int | None = None
    for _ in reading.items("]") if is_list else reading.rest():
        following = reading.line if line is None else max(reading.line, line + 1)
        newlines = b"\n" * (following - (line or 0))
        line = following
        # These are only white space: inside a string, JSON escapes both.
        yield newlines + reading.value()[0].replace("\n", " ").replace("\r", " ").encode()
    if field is None and reading.next_character():
        raise reading.fault("text after the end of the list")
    yield b"\n"


class _Reading:
    """A reader of JSON values. It holds the part of the file that is in memory, and the position in it."""

    def __init__(self, chunks: Iterator[bytes], most_bytes: int) -> None:
        self._chunks, self._most_bytes = chunks, most_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._is_whole = "", False
        self.at = 0
        self.line = 0

    def next_character(self) -> str:
        """Move to the next character that is not white space, and return it, or "" at the end."""
        while True:
            begin = self.at
            while self.at < len(self._text) and self._text[self.at] in _WHITE:
                self.at += 1
            self.line += self._text.count("\n", begin, self.at)
            if self.at < len(self._text):
                return self._text[self.at]
            if not self._more():
                return ""

    def rest(self) -> Iterator[None]:
        """Stop at each value up to the end of the file, and yield. The caller moves past the value."""
        while self.next_character():
            yield

    def items(self, end: str) -> Iterator[None]:
        """Stop at each item of the list or object that starts here, and yield. The caller moves past the item."""
        whole, item = ("list", "an object") if end == "]" else ("object", "a field")
        self.at += 1
        while (character := self.next_character()) != end:
            if not character:
                raise self.fault(f"the {whole} does not end")
            yield
            behind = self.next_character()
            if behind == ",":
                self.at += 1
                if self.next_character() == end:
                    raise self.fault(f"no {item.split()[1]} after a comma")
            elif behind not in {"", end}:
                raise self.fault(f"neither a comma nor the end of the {whole} after {item}")
        self.at += 1

    def names(self) -> Iterator[str]:
        """Yield the name of each field of the object that begins here. The caller moves past the value of the field."""
        for _ in self.items("}"):
            name = self.value()[1] if self.next_character() == '"' else None
            if name is None or self.next_character() != ":":
                raise self.fault("a field without a name, or a name without a colon")
            self.at += 1
            self.next_character()
            yield name

    def value(self) -> tuple[str, Any]:
        """Return the text and the decoded form of the value that begins here, and move past it."""
        while True:
            try:
                value, end = _decode(self._text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos + _LONGEST_TOKEN > len(self._text)
                if not is_cut or not self._more():
                    self.line += self._text.count("\n", self.at, error.pos)
                    raise self.fault(error.msg) from None
            except RecursionError:
                raise self.fault("it is nested too deep") from None
            else:
                if end < len(self._text) or not self._more():
                    begin, self.at = self.at, end
                    self.line += self._text.count("\n", begin, end)
                    return self._text[begin:end], value
            if len(self._text) > self._most_bytes:
                raise self.fault(f"the value that begins here has more than {format_bytes(self._most_bytes)}")

    def fault(self, why: str) -> DataError:
        """Return the error for a fault at this position."""
        return DataError(f"line {self.line + 1}: it is not a list of JSON objects ({why}): correct it")

    def _more(self) -> bool:
        """Read at least one chunk, and as many bytes as are unread in memory. Return whether anything was read."""
        if self._is_whole:
            return False
        raw, num_bytes = b"", len(self._text) - self.at
        while not self._is_whole and len(raw) <= num_bytes:
            chunk = next(self._chunks, None)
            self._is_whole = chunk is None
            raw += chunk or b""
        try:
            more = self._decoder.decode(raw, final=self._is_whole)
        except UnicodeDecodeError as error:
            raise self.fault(f"byte 0x{error.object[error.start]:02x} is not UTF-8") from None
        self._text, self.at = self._text[self.at :] + more, 0
        return bool(raw)


def field_of_rows(chunks: Iterator[bytes], reading: Reading) -> str | None:
    """Return the name of the field that holds the rows of a file with a single object.

    Return ``None`` if this object is a row itself, or if the file does not consist of a single object.

    Args:
        chunks: the bytes of the file.
        reading: the requested columns, by which a row is recognized.

    Raises:
        DataError: if it is ambiguous which field holds the rows; the message does not name the file.
    """
    fields = fields_of_object(chunks, reading.max_text_bytes)
    if fields is None:
        return None
    lists = [name for name, field in fields.items() if field.num_objects]
    is_row = _has_text(fields, reading)
    if len(lists) == 1 and not is_row:
        return lists[0]
    is_asked_for = is_row and reading.columns is not None
    if lists and not (is_asked_for and not any(_has_text(fields[name].names, reading) for name in lists)):
        raise DataError(_ambiguous(fields, lists, is_row))
    if not reading.is_tagged:
        _require_row(fields, reading, is_row)
    return None


def _has_text(names: Collection[str], reading: Reading) -> bool:
    """Return whether field names contain the requested columns, or else the default column of the text."""
    if reading.columns is not None:
        return all(name in names for name in reading.columns)
    return any(name in names for name in (WORDS_NAMES if reading.is_tagged else ("text",)))


def _ambiguous(fields: dict[str, Field], lists: list[str], is_row: bool) -> str:
    number = f"{len(lists)} lists" if len(lists) > 1 else "a list"
    own = "a text of its own and " if is_row else ""
    as_one = ", or put [ and ] around the object if it is one text" if is_row else ""
    return (
        f"it is one object with {own}{number} of objects ({_shown(fields, lists)}), so it is ambiguous which holds "
        f"the texts; write the intended objects as JSON lines, for example with `{_command(lists[0])}`{as_one}"
    )


def _require_row(fields: dict[str, Field], reading: Reading, is_row: bool) -> None:
    """Raise if an object holds columns instead of rows, or if it is unclear which field is its text.

    ``is_row``: the object has the fields of a row.
    """
    columns = [name for name in reading.columns or ("text",) if is_row and fields[name].is_nested]
    nested = [name for name, field in fields.items() if field.is_nested]
    if columns:
        raise DataError(
            f"it is one object of columns ({_shown(fields, columns)}), not of rows; write a row in each line of a "
            "file that ends in .jsonl, for example with pandas: "
            'read_json("FILE.json").to_json("FILE.jsonl", orient="records", lines=True)'
        )
    if nested and not is_row and reading.columns is None:
        raise DataError(
            f"it is one object without a list of objects, and none of its fields {listed(list(fields))} is called "
            f"text ({_shown(fields, nested)}); write one object per line, or name the text field with "
            "text: <column> if the whole object is one text"
        )


def _shown(fields: dict[str, Field], names: list[str]) -> str:
    some = ", ".join(f"{name!r} is {fields[name].kind}" for name in names[:10])
    return f"{some} and {len(names) - 10} more" if len(names) > 10 else some


def _command(name: str) -> str:
    path = f".{name}" if name.isidentifier() and name.isascii() else f".[{json.dumps(name)}]"
    return f"jq -c '{path}[]' FILE.json > FILE.jsonl"
