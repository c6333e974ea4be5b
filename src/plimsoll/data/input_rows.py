"""All rows of one file in order, by index: the input to which a model is applied.

A corpus (`plimsoll.data.text.index`) leaves out rows that cannot be used. Here every row is returned, so that results
line up with the file. A row without a text has the reason in `InputRow.fault`. Rows are read once, one mebibyte at a
time, and are not kept in memory. Rows before the first requested row are skipped without parsing.

The file name determines the format: jsonl (ndjson), json (also a list of objects), csv and tsv, parquet, arrow. Any
other file is plain text, in which every line is a row, including empty lines. Blank lines of a jsonl file and empty
lines of a csv file are not rows. Compressed files (.gz, .zst, .bz2, .xz) are unpacked.

Not handled: nested fields, folders and archives, data sets of Hugging Face, and rows added while the file is read.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.data.formats import Layout, Reading, jsonl
from plimsoll.data.formats import csv as csv_format
from plimsoll.data.formats.helpers.columns import no_column, text_columns
from plimsoll.data.formats.helpers.records import HEAD_BYTES
from plimsoll.data.text.convert import format_of
from plimsoll.data.text.json_values import are_lines, field_of_rows, json_lines
from plimsoll.data.text.sources import SourceFile, find_files
from plimsoll.data.text.unpack import Torn, chunks_of, is_archive, plain_chunks, uncompressed
from plimsoll.errors import DataError
from plimsoll.files.identity import identity_of
from plimsoll.records.units import format_bytes

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUOTE = b'"'


class InputRow(NamedTuple):
    """One row of a file: its index ``number``, its text, and the requested other columns (``kept``).

    ``fault`` is the reason why the row has no text; ``None`` if it has a text.
    """

    number: int
    text: str
    fault: str | None = None
    kept: dict[str, Any] = {}  # noqa: RUF012 -- never written to


class _Raw(NamedTuple):
    """A row before it is parsed: its bytes or its columns. If a row is too long, only its first bytes are kept.

    ``num_bytes`` is the full length (0 for columns). ``num_lost_quotes`` counts the quotes in the bytes not kept.
    """

    content: Any
    num_bytes: int
    num_lost_quotes: int = 0


@dataclass(frozen=True)
class InputRows:
    """The rows of a file.

    Attributes:
        file: the file.
        reading: the columns with the text; ``on_error`` has no effect here.
        keep: the names of other columns to return with each row.
    """

    file: SourceFile
    reading: Reading
    keep: tuple[str, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """Values that identify the content of the file and the rules for reading it, but not its folder."""
        ((path, num_bytes, _, sample),) = identity_of([self.file])
        return {
            "name": Path(path).name,
            "num_bytes": num_bytes,
            "content": sample.hex(),
            "--column": list(self.reading.columns or ()),
            "--keep": list(self.keep),
            "--no-header": self.reading.header is False,
        }

    def rows(self, first: int = 0, tell: Callable[[int], None] = lambda done_bytes: None) -> Iterator[InputRow]:
        """Yield the rows from index ``first``.

        Args:
            first: the index of the first row to yield.
            tell: called with the number of bytes of the file that have been read so far.

        Raises:
            DataError: if the file cannot be read, or lacks a requested column.
        """
        raws, look = self._opened(tell)
        for number, raw in enumerate(raws):
            if number >= first:
                yield self._row(number, raw, look)

    def _row(self, number: int, raw: _Raw, look: Callable[[Any], tuple[str, dict[str, Any]]]) -> InputRow:
        if raw.num_bytes > self.reading.max_text_bytes:
            most = format_bytes(self.reading.max_text_bytes)
            return InputRow(number, "", f"the row has {format_bytes(raw.num_bytes)}, more than {most}: cut it")
        try:
            text, kept = look(raw.content)
        except _Fault as fault:
            return InputRow(number, "", str(fault), fault.kept)
        return InputRow(number, text, None if text else "the text is empty", kept)

    def _opened(self, tell: Callable[[int], None]) -> tuple[Iterator[_Raw], Callable[[Any], Any]]:
        form = format_of(self.file.path)
        if form in {"parquet", "arrow"}:
            return self._of_table(form, tell)
        if is_archive(self.file.path):
            raise DataError(f"{self.file.path} is an archive, but results are for one file: give one of its files")
        chunks = _chunks(self.file.path, tell)
        if form == "json":
            begin, chunks = _head(chunks)
            form, chunks = "jsonl", chunks if are_lines(begin) else self._listed(chunks)
        if form == "csv":
            return self._of_csv(chunks)
        lines = _lines(chunks, self.reading.max_text_bytes)
        if form == "jsonl":
            head, lines = _ahead(lines)
            layout = _said_of(self.file.path, _jsonl_layout, head, self.reading)
            self._require_columns(head)
            return (raw for raw in lines if raw.content.strip()), lambda line: _json_row(line, layout, self.keep)
        if asked := [*(self.reading.columns or ()), *self.keep]:
            raise DataError(f"{self.file.path} is plain text, which has no column {asked[0]!r}: leave it out")
        return lines, lambda line: (_decoded(line), {})

    def _listed(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the objects of a file with a JSON list as JSON lines."""
        path = self.file.path
        field = _said_of(path, field_of_rows, _chunks(path, lambda done_bytes: None), self.reading)
        try:
            yield from json_lines(chunks, self.reading.max_text_bytes, field)
        except DataError as error:
            raise DataError(f"cannot use {path}: {error}") from None

    def _require_columns(self, head: list[bytes]) -> None:
        """Raise if all of the first objects lack a requested column. A later row that lacks it gets a fault."""
        names = {name: None for line in head if isinstance(record := _parsed(line), dict) for name in record}
        for name in (*(self.reading.columns or ()), *self.keep):
            if names and name not in names:
                raise DataError(f"cannot use {self.file.path}: {no_column(name, list(names))}")

    def _of_csv(self, chunks: Iterator[bytes]) -> tuple[Iterator[_Raw], Callable[[Any], Any]]:
        head, chunks = _head(chunks)
        layout, first_byte, places = _csv_layout(self.file.path, head, self.reading, self.keep)
        lines = _lines(_behind(chunks, first_byte), self.reading.max_text_bytes)
        rows = _quoted(lines, layout, self.reading.max_text_bytes) if layout.quotes else lines
        return (raw for raw in rows if raw.content.strip(b"\r\n")), lambda raw: _csv_row(raw, layout, places)

    def _of_table(self, form: str, tell: Callable[[int], None]) -> tuple[Iterator[_Raw], Callable[[Any], Any]]:
        from plimsoll.data.text.tables import open_arrow, open_parquet, strings_of

        with (open_parquet if form == "parquet" else open_arrow)(self.file.path, self.file.path) as table:
            names = table.schema.names
            columns = _said_of(self.file.path, text_columns, self.reading, names, strings_of(table.schema))
            for name in self.keep:
                if name not in names:
                    raise DataError(f"cannot use {self.file.path}: {no_column(name, names)}")

        def raws() -> Iterator[_Raw]:
            with (open_parquet if form == "parquet" else open_arrow)(self.file.path, self.file.path) as opened:
                for batch, done_bytes in opened.batches(list(dict.fromkeys([*columns, *self.keep]))):
                    yield from (_Raw(record, 0) for record in batch.to_pylist())
                    tell(done_bytes)

        layout = Layout("jsonl", columns=columns)
        return raws(), lambda record: _record_row(record, layout, self.keep)


def open_rows(path: Path, reading: Reading, keep: Sequence[str] = ()) -> InputRows:
    """Open a file to read its rows, and read the first row as a check.

    Raises:
        DataError: if the file does not exist, cannot be read, or lacks a requested column.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder, but results are for the rows of one file: give one of its files")
    (file,) = find_files((str(path),)).files
    rows = InputRows(file, reading, tuple(keep))
    if file.num_bytes:
        next(rows.rows(), None)
    return rows


class _Fault(Exception):
    """The reason why a row has no text. ``kept`` holds the columns to keep, if they are known."""

    def __init__(self, why: str, kept: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.kept = kept or {}


def _said_of(path: str, work: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return work(*arguments)
    except DataError as error:
        raise DataError(f"cannot use {path}: {error}") from None


def _chunks(path: str, tell: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the uncompressed content of a file in chunks."""
    try:
        with open(path, "rb") as file:
            for chunk in chunks_of(path, file) if uncompressed(path) != path else plain_chunks(file):
                yield chunk
                tell(file.tell())
    except Torn as error:
        raise DataError(f"cannot unpack {path}: {error}; download or write it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): allow reading it, or check the disk") from None


def _lines(chunks: Iterator[bytes], most_bytes: int) -> Iterator[_Raw]:
    """Yield the lines without line ends. If a line exceeds ``most_bytes``, only its beginning is kept."""
    rest, num_bytes, num_lost_quotes, is_first = b"", 0, 0, True
    for chunk in chunks:
        if is_first:
            chunk, is_first = chunk.removeprefix(_BYTE_ORDER_MARK), False  # noqa: PLW2901 -- still the same chunk
        first, *others = chunk.split(b"\n")
        if num_bytes <= most_bytes:
            rest += first
        else:
            num_lost_quotes += first.count(_QUOTE)
        num_bytes += len(first)
        for line in others:
            yield _Raw(rest, num_bytes, num_lost_quotes)
            rest, num_bytes, num_lost_quotes = line, len(line), 0
    if num_bytes:
        yield _Raw(rest, num_bytes, num_lost_quotes)


def _ahead(lines: Iterator[_Raw]) -> tuple[list[bytes], Iterator[_Raw]]:
    """Return the first lines, and an iterator over all lines that includes the first."""
    taken: list[_Raw] = []
    for raw in lines:
        taken.append(raw)
        if sum(each.num_bytes for each in taken) >= HEAD_BYTES:
            break

    def whole() -> Iterator[_Raw]:
        while taken:
            yield taken.pop(0)
        yield from lines

    return [raw.content for raw in taken], whole()


def _head(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the beginning of a file, and an iterator over its whole content that includes the beginning."""
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= HEAD_BYTES:
            break

    def whole() -> Iterator[bytes]:
        yield head
        yield from chunks

    return head, whole()


def _behind(chunks: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    """Yield the content of ``chunks`` after its first ``num_bytes`` bytes."""
    for chunk in chunks:
        yield chunk[num_bytes:]
        num_bytes = max(num_bytes - len(chunk), 0)


def _quoted(lines: Iterator[_Raw], layout: Layout, most_bytes: int) -> Iterator[_Raw]:
    """Join each line that ends inside a quoted field with the following lines."""
    parts: list[bytes] = []
    num_bytes, quoting = 0, csv_format.OPENS
    for raw in lines:
        quoting = csv_format.quoting_after_line(raw.content, layout, quoting)
        is_open = (quoting == csv_format.QUOTED) ^ (raw.num_lost_quotes % 2 == 1)
        quoting = csv_format.QUOTED if is_open else csv_format.OPENS
        num_bytes += raw.num_bytes + bool(parts)
        if num_bytes <= most_bytes or not parts:
            parts.append(raw.content)
        if not is_open:
            yield _Raw(b"\n".join(parts), num_bytes)
            parts, num_bytes = [], 0
    if parts:
        yield _Raw(b"\n".join(parts), num_bytes)


def _decoded(line: bytes) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Fault(f"it is not UTF-8 (byte {line[error.start]:#04x} at {error.start})") from None


def _jsonl_layout(head: list[bytes], reading: Reading) -> Layout:
    if reading.columns is not None:
        return Layout("jsonl", columns=reading.columns)
    records = [record for line in head if isinstance(record := _parsed(line), dict)]
    if not records or any("text" in record for record in records):  # the first row may lack a text
        return Layout("jsonl", columns=("text",))
    return Layout("jsonl", columns=jsonl.columns_of(records[0], reading))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _json_row(line: bytes, layout: Layout, keep: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    text = _decoded(line)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Fault(f"it is not JSON ({error.msg} at character {error.colno})") from None
    except RecursionError:
        raise _Fault("it is nested too deep") from None
    except ValueError as error:
        raise _Fault(f"it is not JSON that can be read ({error})") from None
    return _record_row(record, layout, keep)


def _record_row(record: Any, layout: Layout, keep: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    kept = {name: record[name] for name in keep if name in record} if isinstance(record, dict) else {}
    try:
        text = jsonl.text_of(record, layout)
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Fault("its text has half of a surrogate pair, which is not a character", kept) from None
    except DataError as error:
        raise _Fault(str(error), kept) from None
    return text, kept


def _csv_layout(path: str, head: bytes, reading: Reading, keep: tuple[str, ...]) -> tuple[Layout, int, dict[str, int]]:
    """Return the layout of a csv file, the byte offset of its first row, and the indices of the columns to keep."""
    with tempfile.NamedTemporaryFile(suffix=Path(uncompressed(path)).suffix) as begin:
        begin.write(head)
        begin.flush()
        layout, first_byte = _said_of(path, csv_format.look, begin.name, reading)
        asked = {name: replace(reading, text=name) for name in keep}
        places = {name: _said_of(path, csv_format.look, begin.name, only)[0].columns[0] for name, only in asked.items()}
    return layout, first_byte, places


def _csv_row(raw: bytes, layout: Layout, places: dict[str, int]) -> tuple[str, dict[str, Any]]:
    try:
        (fields,) = csv_format.fields_of([_decoded(raw.strip(b"\r\n"))], layout)
    except (ValueError, csv.Error) as error:
        num_more = raw.count(b"\n")
        why = f"a quote in it that is not closed takes the {num_more} lines after it into the same row"
        raise _Fault(why if num_more else f"it is not csv ({error})") from None
    if len(fields) != layout.num_columns:
        raise _Fault(f"it has {len(fields)} fields where the first row has {layout.num_columns}")
    return csv_format.text_of(fields, layout), {name: fields[place] for name, place in places.items()}
