"""A streaming parser that finds the out-of-memory errors in a text or a log of any length.

If several ranks print the same message at the same place, it counts as one event that happened several times. These
inputs are handled: terminal escape sequences, carriage returns of progress bars, Windows line ends, UTF-16, gzip (also
truncated), and JSON lines that contain the message as text.

The place of an error is the last line of user code in the Python traceback above the message. User code is outside
installed packages and the standard library. If the process aborts, the place is the first line of user code that
`faulthandler` writes below the message for the current thread (see `plimsoll.device.aborts.Dump`). Not handled:
tracebacks of notebooks and of other languages.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from plimsoll.device.aborts import Dump
from plimsoll.device.oom_errors import family_of_text, is_users
from plimsoll.diagnose.parse.event import event_of, has_numbers
from plimsoll.records.oom_text import OomText

_MOST_LINES = 12  # of a message; it ends earlier if a traceback or another message with numbers begins
_MOST_CHARACTERS_ABOVE = 2000
_MOST_EVENTS = 1000  # distinct events to keep; the last event is always kept
_MOST_CHARACTERS_OF_LINE = 1 << 16  # a longer line counts as several lines
_LINES_PER_REPORT = 1 << 16
_BUFFER_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
# Keys of the message in a record: Docker's json-file driver, then several kinds of loggers.
_MESSAGES = ("log", "message", "msg", "text", "event")

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Every text of `plimsoll.device.oom_errors` contains one of these, ignoring case. Most log lines are skipped here.
_HINTS = (
    "out of ", "out_of_", "out-of-", "oom", "allocfailed", "alloc_failed", "bad_alloc", "allocate ", "memoryerror",
    "memory_error", "memoryallocation", "cpuallocator", "would exceed", "cudnn algorithm", "runtime error (2)",
    "handles_.at", "bus error", "shared memory", "space left", "killed", "unexpectedly", "errno 12",
    "memory allocation of", "of size ", "low on memory",
)  # fmt: skip
# Prose about memory, in lines that begin with no error: advice, a setting, or code that searches for the words.
_TALK = re.compile(
    r"\b(?:if|when|whenever|encounter\w*|avoid\w*|prevent\w*|tips?|hint|note|would|might|could|may|no|not|without|handler|"
    r"policy|catch\w*|retry|disabled|enabled|common|fix)\b|\bin str\(|^\s*#|raise |except ",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"^\W*(?:[\w.]*(?:Error|Exception)\b|(?:CUDA|HIP|NCCL|cuDNN|CUDNN) error|Allocation on device|terminate called|"
    r"what\(\)|Killed|memory allocation of \d+ bytes failed)|slurmstepd: |Killed process|oom-kill:c\w+=|"
    r"\bERROR\b.{0,80}\] \w*(?:Error|Exception): "
)
# Prefixes that log collectors write in front of a line: a rank, a time, the stream.
_PREFIX = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:|\d{1,4}:|"
    r"\[?\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\]?(?: std(?:out|err) [FP])?) ?"
)
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "([^"]{1,4096})", line (\d+), in ')


@dataclass
class Log:
    """The out-of-memory errors that were found in a log.

    Attributes:
        events: the distinct errors.
        last: the last error; ``None`` if the log has no out-of-memory error.
        num_lines: number of lines of the log.
        tail: the last lines of the log.
    """

    events: tuple[OomText, ...]
    last: OomText | None
    num_lines: int
    tail: str


@dataclass
class _Message:
    """One error message while it is being read.

    Attributes:
        family: family of the error (see `plimsoll.device.oom_errors`).
        line_number: number of the first line of the message.
        place: the line of user code that raised the error, ``file.py:12``; "" if unknown.
        code: the source text of that line.
        lines: lines of the message.
        above: the traceback above the message.
        dump: parser of the stacks that `faulthandler` writes below the message.
    """

    family: str
    line_number: int
    place: str
    code: str
    lines: list[str]
    above: str = ""
    dump: Dump = field(default_factory=Dump)

    def event(self) -> OomText:
        event = event_of("\n".join(self.lines), self.family)
        place = self.place or self.dump.place
        where = {"line_number": self.line_number, "place": place, "code": self.code, "above": self.above}
        return event.model_copy(update=where)


@dataclass
class _Reader:
    """The state of the parser between two lines of a log."""

    message: _Message | None = None
    place: str = ""
    code: str = ""
    is_code_next: bool = False
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def read(self, number: int, line: str) -> OomText | None:
        """Parse one line. Return the event of a message that this line ends, or ``None`` if it ends no message."""
        if self.message is not None and self.message.dump.takes(line):
            self.tail.append(line)
            return None
        ended = self._ended_by(line)
        if self.is_code_next or "File" in line or _TRACEBACK in line:
            self._note_frame(line)
        family = self._family_of(line) if _has_hint(line) else None
        if self.message is not None:
            self.message.lines.append(line)
        elif family is not None:
            self.message = _Message(family, number, self.place, self.code, [line], self._above())
            self.place = self.code = ""
        self.tail.append(line)
        return ended

    def _family_of(self, line: str) -> str | None:
        """Return the error family of a line; ``None`` for any other line.

        The text of an error may wrap from the line before. Code in tracebacks and prose about memory do not count.
        """
        before = self.tail[-1] if self.tail else ""
        if _FRAME.match(before) or (_TALK.search(line) and not _ERROR.search(line) and not has_numbers(line)):
            return None
        return family_of_text(line) or (family_of_text(f"{before} {line}") if before.endswith(":") else None)

    def _above(self) -> str:
        """Return the traceback above the message, as far as the last 40 lines contain it; "" without a traceback."""
        lines = list(self.tail)
        begins = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
        return "\n".join(lines[begins[-1] :])[-_MOST_CHARACTERS_ABOVE:] if begins else ""

    def end(self) -> OomText | None:
        """End the message that is being read, and return its event; ``None`` if no message is being read."""
        message, self.message = self.message, None
        return None if message is None else message.event()

    def _ended_by(self, line: str) -> OomText | None:
        message = self.message
        if message is None:
            return None
        is_next = _TRACEBACK in line or (has_numbers(line) and has_numbers("\n".join(message.lines)))
        return self.end() if is_next or len(message.lines) >= _MOST_LINES else None

    def _note_frame(self, line: str) -> None:
        if self.is_code_next:
            self.code, self.is_code_next = line.strip()[:200], False
        elif _TRACEBACK in line:
            self.place = self.code = ""
        elif (frame := _FRAME.match(line)) is not None and is_users(frame[1]):
            self.place, self.code, self.is_code_next = f"{frame[1]}:{frame[2]}", "", True


def read_log(file: BinaryIO, report: Callable[[int], None] = lambda _: None) -> Log:
    """Read a log to its end.

    Args:
        file: a binary file; it need not be seekable.
        report: progress callback, called with the number of characters read.
    """
    reader, found, last = _Reader(), dict[tuple[object, ...], OomText](), None
    number = num_characters = 0
    for number, line in enumerate(_lines(file), start=1):
        num_characters += len(line) + 1
        if (event := reader.read(number, _PREFIX.sub("", line))) is not None:
            last = _count(found, event)
        if number % _LINES_PER_REPORT == 0:
            report(num_characters)
    if (event := reader.end()) is not None:
        last = _count(found, event)
    return Log(tuple(found.values()), last, number, "\n".join(reader.tail))


def _count(found: dict[tuple[object, ...], OomText], event: OomText) -> OomText:
    key = (event.kind, event.place, event.tried_to_allocate)
    before = found.get(key)
    counted = event if before is None else before.model_copy(update={"num_times": before.num_times + 1})
    if before is not None or len(found) < _MOST_EVENTS:
        found[key] = counted
    return counted


def _has_hint(line: str) -> bool:
    lower = line.lower()
    return any(hint in lower for hint in _HINTS)


def _lines(file: BinaryIO) -> Iterator[str]:
    stream = _opened(file)
    head = stream.peek(2)[:2]
    encoding = "utf-16" if head in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    text = io.TextIOWrapper(stream, encoding=encoding, errors="replace", newline=None)
    while line := text.readline(_MOST_CHARACTERS_OF_LINE):
        for one in _of_record(line) if line.startswith("{") else (line,):
            yield _ESCAPES.sub("", one.rstrip("\n")) if "\x1b" in one else one.rstrip("\n")


def _opened(file: BinaryIO) -> io.BufferedReader:
    """Return a buffered stream of the file's content, decompressed if it is gzip."""
    stream = io.BufferedReader(cast(Any, _Raw(file.read)), _BUFFER_BYTES)
    if stream.peek(2)[:2] != _GZIP:
        return stream
    return io.BufferedReader(cast(Any, _Unpacked(gzip.GzipFile(fileobj=stream).read1)), _BUFFER_BYTES)


def _of_record(line: str) -> list[str]:
    """Return the lines of text in a JSON line that a container driver or structured logger wrote.

    A line that is not such a record is returned unchanged.
    """
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        for name in _MESSAGES:
            if isinstance(record, dict) and isinstance(record.get(name), str):
                return str(record[name]).splitlines() or [""]
    return [line]


class _Raw(io.RawIOBase):
    """A raw stream around a read function, for `io.BufferedReader`. Closing it does not close the file."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Unpacked(_Raw):
    """A stream that decompresses gzip. It ends without an error if the data is truncated, as after a killed process."""

    def readinto(self, buffer: Any) -> int:
        with suppress(EOFError, OSError, zlib.error):
            return super().readinto(buffer)
        return 0
