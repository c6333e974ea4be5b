"""JSON files that hold a list of objects, or objects one behind the other, as JSON lines: an object in each.

An object begins in the line in which it begins in its file, so that the number of a line says where to look; of several
objects in one line each gets a line of its own. Memory: the longest object. NOT covered: one object around all others.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from plimsoll.errors import DataError
from plimsoll.records.units import format_bytes

_WHITE = " \t\r\n"
_LONGEST_TOKEN = 12  # an escaped pair of surrogates: what may be cut at the end of what has been read
_decode = json.JSONDecoder().raw_decode


def begins_with_object(head: bytes) -> bool:
    """Return whether the first line that is not blank is an object, so that the file is one of JSON lines."""
    for line in head.removeprefix(codecs.BOM_UTF8).split(b"\n"):
        if line.strip():
            try:
                return isinstance(json.loads(line), dict)
            except (ValueError, RecursionError):
                return False
    return False


def json_lines(chunks: Iterator[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the objects of a file, which comes in chunks, each with the newlines before it.

    Raises:
        DataError: if it is not JSON, or an object is longer than ``most_bytes``; the message names no file.
    """
    reading = _Reading(chunks, most_bytes)
    is_list = reading.next_character() == "["
    reading.at += is_list
    line: int | None = None
    while (character := reading.next_character()) and character != "]":
        following = reading.line if line is None else max(reading.line, line + 1)
        newlines = b"\n" * (following - (line or 0))
        line = following
        # Inside a string both are written with a backslash.
        yield newlines + reading.value().replace("\n", " ").replace("\r", " ").encode()
        behind = reading.next_character()
        if is_list and behind == ",":
            reading.at += 1
            if reading.next_character() == "]":
                raise reading.fault("a comma and no object behind it")
        elif is_list and behind not in {"", "]"}:
            raise reading.fault("neither a comma nor the end of the list behind an object")
    if is_list and not character:
        raise reading.fault("the list does not end")
    reading.at += is_list
    if reading.next_character():
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

    def value(self) -> str:
        """Return the text of the value that begins here, and go behind it."""
        while True:
            try:
                _, end = _decode(self._text, self.at)
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
                    return self._text[begin:end]
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
