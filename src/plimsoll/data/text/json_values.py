"""JSON files that hold a list of objects, or objects one behind the other, as JSON lines: an object in each.

The list may be a field of the one object that is all of a file, where it is its only list of objects. Whatever else an
object may be (several lists, columns, a row with a list of its own) is refused with what to type, so that nothing in it
is left out in silence. An object begins in the line in which it begins in its file, so that the number of a line says
where to look; of several objects in one line each gets a line of its own. Memory: the longest object. NOT covered:
lists deeper in an object.
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
_LONGEST_TOKEN = 12  # an escaped pair of surrogates: what may be cut at the end of what has been read
_decode = json.JSONDecoder().raw_decode


def are_lines(head: bytes) -> bool:
    """Return whether a file that begins so is one of JSON lines: its first line is an object, and not its only line.

    Blank lines do not count.
    """
    lines = [line for line in head.removeprefix(codecs.BOM_UTF8).split(b"\n") if line.strip()]
    try:
        return len(lines) > 1 and isinstance(json.loads(lines[0]), dict)
    except (ValueError, RecursionError):
        return False


class Field(NamedTuple):
    """What a field of an object holds, in words, how many objects are in its list, and the names in the first."""

    kind: str
    is_nested: bool  # it is a list or an object
    num_objects: int = 0
    names: tuple[str, ...] = ()


def fields_of_object(chunks: Iterator[bytes], most_bytes: int) -> dict[str, Field] | None:
    """Return the fields of the object that is all of a file, which comes in chunks; ``None`` if it holds other things.

    Raises:
        DataError: if it begins with an object that is not JSON, or has a field twice; the message names no file.
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
    """Return what the value holds that begins here, and go behind it."""
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
    """Yield the objects of a file, which comes in chunks, each with the newlines before it.

    Args:
        chunks: the bytes of the file.
        most_bytes: how long an object may be.
        field: which field of the one object of the file holds the list; ``None``: the file itself is a list, or
            objects one behind the other.

    Raises:
        DataError: if it is not JSON, or an object is longer than ``most_bytes``; the message names no file.
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
        # Inside a string both are written with a backslash.
        yield newlines + reading.value()[0].replace("\n", " ").replace("\r", " ").encode()
    if field is None and reading.next_character():
        raise reading.fault("something behind the end of the list")
    yield b"\n"


class _Reading:
    """What of a file is in memory, and the place in it."""

    def __init__(self, chunks: Iterator[bytes], most_bytes: int) -> None:
        self._chunks, self._most_bytes = chunks, most_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._is_whole = "", False
        self.at = 0
        self.line = 0

    def next_character(self) -> str:
        """Go on to the next character that is not white; return it, or nothing at the end."""
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
        """Stop at each value up to the end of the file; who stops goes behind it."""
        while self.next_character():
            yield

    def items(self, end: str) -> Iterator[None]:
        """Stop at each item of the list or object that begins here and ends with ``end``; who stops goes behind it."""
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
                    raise self.fault(f"a comma and no {item.split()[1]} behind it")
            elif behind not in {"", end}:
                raise self.fault(f"neither a comma nor the end of the {whole} behind {item}")
        self.at += 1

    def names(self) -> Iterator[str]:
        """Yield the name of each field of the object that begins here, at its value; who takes it goes behind that."""
        for _ in self.items("}"):
            name = self.value()[1] if self.next_character() == '"' else None
            if name is None or self.next_character() != ":":
                raise self.fault("a field without a name, or a name without a colon")
            self.at += 1
            self.next_character()
            yield name

    def value(self) -> tuple[str, Any]:
        """Return the value that begins here, as it is written and as it is meant, and go behind it."""
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
                raise self.fault(f"what begins here has more than {format_bytes(self._most_bytes)}")

    def fault(self, why: str) -> DataError:
        """Return the error that something is wrong here."""
        return DataError(f"line {self.line + 1}: it is not a list of JSON objects ({why}): correct it")

    def _more(self) -> bool:
        """Read as much as is there already, at least a chunk; return whether there was more."""
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
    """Return which field of the one object of a file has the rows; ``None`` where it is a row, or there are several.

    Args:
        chunks: the bytes of the file.
        reading: what of it is a text. A column that is asked for says whether the object is the row.

    Raises:
        DataError: if it cannot be told; the message names no file.
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
    """Return whether an object with fields of these names has the text that is asked for, or that is looked for."""
    if reading.columns is not None:
        return all(name in names for name in reading.columns)
    return any(name in names for name in (WORDS_NAMES if reading.is_tagged else ("text",)))


def _ambiguous(fields: dict[str, Field], lists: list[str], is_row: bool) -> str:
    number = f"{len(lists)} lists" if len(lists) > 1 else "a list"
    own = "a text of its own and " if is_row else ""
    as_one = ", or put [ and ] around the object if it is one text" if is_row else ""
    return (
        f"it is one object with {own}{number} of objects ({_shown(fields, lists)}), so it cannot be told where the "
        f"texts are; write the one that is meant as JSON lines, for example with `{_command(lists[0])}`{as_one}"
    )


def _require_row(fields: dict[str, Field], reading: Reading, is_row: bool) -> None:
    """Refuse an object whose fields are columns, or in which the text would have to be guessed."""
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
            f"text ({_shown(fields, nested)}); write its texts as JSON lines, or give the field with text: <column> "
            "if the object is one text"
        )


def _shown(fields: dict[str, Field], names: list[str]) -> str:
    some = ", ".join(f"{name!r} is {fields[name].kind}" for name in names[:10])
    return f"{some} and {len(names) - 10} more" if len(names) > 10 else some


def _command(name: str) -> str:
    path = f".{name}" if name.isidentifier() and name.isascii() else f".[{json.dumps(name)}]"
    return f"jq -c '{path}[]' FILE.json > FILE.jsonl"
