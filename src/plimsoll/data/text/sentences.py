"""Reading of sentences with tagged words, and writing of them to `plimsoll.data.formats.tagged`.

The supported formats are JSON lines and tables (parquet, Arrow, `datasets`) with a column of words and a column of
tags, each a list. Files in CoNLL format have a word per line, its tag in the last column, and an empty line between
sentences. Tags are names, or whole numbers with names in a ``ClassLabel`` of `datasets`; -100 means no tag. Memory: one
sentence, or one batch of rows. Not handled: csv, several tags per word, and token ranges and empty nodes of CoNLL-U.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow

from plimsoll.data.formats import Reading
from plimsoll.data.formats.helpers.columns import MOST_LABELS, WORDS_NAMES, listed, no_column
from plimsoll.data.formats.helpers.scanning import read_head, text_begin
from plimsoll.data.formats.packed import ENDS_FILE, TEXTS_FILE
from plimsoll.data.formats.tagged import NO_TAG, stored_text
from plimsoll.data.text.index_rows import MOST_SKIPPED_LISTED, sorted_names
from plimsoll.data.text.tables import Table
from plimsoll.errors import DataError
from plimsoll.files.remote import descriptor_of
from plimsoll.files.store import Facts
from plimsoll.records.units import format_bytes

_DOCUMENT = "-DOCSTART-"
_HUGGING_FACE = b"huggingface"  # key in the schema's metadata for the features of a data set
_FLUSH_BYTES, _HEAD_BYTES = 1 << 20, 8 << 10


class Sentence(NamedTuple):
    """The words of a sentence, their tags, the place in the source, and the bytes of the source read so far.

    ``why`` is the reason why the sentence is faulty; ``None`` if it is not.
    """

    place: str
    words: list[str]
    tags: list[str]
    done_bytes: int
    why: str | None = None


def pack_sentences(
    folder: Path, sentences: Iterator[Sentence], name: str, reading: Reading, show: Callable[[int], None]
) -> Facts:
    """Write the non-empty sentences into a store. Return the count of each tag, and the skipped sentences.

    Args:
        folder: the folder of the store.
        sentences: the sentences to write.
        name: the name of the source, for messages.
        reading: the rules for faulty and long sentences.
        show: called with the bytes of the source read so far.

    Raises:
        DataError: at the first faulty sentence if faults are not skipped, or if there are too many tags.
        OutputError: if the disk is full.
    """
    packing = _Packing(name, reading)
    with (folder / TEXTS_FILE).open("wb") as texts, (folder / ENDS_FILE).open("wb") as ends:
        for sentence in sentences:
            packing.add(sentence)
            if len(packing.raw) >= _FLUSH_BYTES:
                packing.flush(texts, ends)
                show(sentence.done_bytes)
        packing.flush(texts, ends)
    names = sorted_names(list(packing.counts))
    return {
        "skipped": packing.skipped,
        "num_skipped": packing.num_skipped,
        "tags": [[name, packing.counts[name]] for name in names],
    }


class _Packing:
    """The tag counts and skipped sentences so far, and the bytes to write."""

    def __init__(self, name: str, reading: Reading) -> None:
        self._name, self._reading = name, reading
        self.raw, self._ends = bytearray(), array("q")
        self._num_bytes = self.num_skipped = 0
        self.counts: Counter[str] = Counter()
        self.skipped: list[str] = []

    def add(self, sentence: Sentence) -> None:
        """Add a sentence to the bytes to write. A faulty sentence is skipped and counted, or raised."""
        raw, why = b"", sentence.why or _mismatch(sentence)
        if why is None and sentence.words:
            try:
                raw = stored_text(sentence.words, sentence.tags).encode("utf-8")
                why = self._fault_of(raw, sentence)
            except UnicodeEncodeError:
                why = "a word has half of a surrogate pair, which is not a character: correct it"
        if why is not None:
            self._meet(f"{sentence.place}: {why}")
        elif raw:
            self.counts.update(tag for tag in sentence.tags if tag != NO_TAG)
            if len(self.counts) > MOST_LABELS:
                raise DataError(
                    f"{self._name} holds more than {MOST_LABELS} tags, for example {listed(list(self.counts)[:3])}: "
                    "give the column of the tags"
                )
            self.raw += raw
            self._ends.append(self._num_bytes + len(self.raw))

    def flush(self, texts: IO[bytes], ends: IO[bytes]) -> None:
        """Write the added sentences to the files."""
        texts.write(self.raw)
        ends.write(self._ends.tobytes())
        self._num_bytes += len(self.raw)
        self.raw, self._ends = bytearray(), array("q")

    def _fault_of(self, raw: bytes, sentence: Sentence) -> str | None:
        num_words = len(sentence.words)
        if raw.count(b"\n") != num_words - 1 or raw.count(b"\t") != num_words:
            return "a word or a tag holds a tab or a line break, which words must not contain: split it there"
        if "" in sentence.tags:
            return f"word {sentence.tags.index('') + 1} has no tag: give each word one, such as O"
        if len(raw) > self._reading.max_text_bytes:
            limit = format_bytes(self._reading.max_text_bytes)
            return f"it has {format_bytes(len(raw))}, more than {limit}: split it into shorter sentences"
        return None

    def _meet(self, why: str) -> None:
        if self._reading.on_error == "stop":
            raise DataError(
                f"cannot use {self._name} as words with tags: {why}; set on_error: skip to leave out "
                "unreadable sentences"
            )
        self.num_skipped += 1
        if len(self.skipped) < MOST_SKIPPED_LISTED:
            self.skipped.append(why)


def _mismatch(sentence: Sentence) -> str | None:
    num_words, num_tags = len(sentence.words), len(sentence.tags)
    if num_words == num_tags:
        return None
    return f"it has {num_words} words and {num_tags} tags: give each word one"


def conll_sentences(path: str, reading: Reading) -> Iterator[Sentence]:
    """Yield the sentences of a file with one word per line.

    Columns are separated by tabs if the first line that does not begin with # has one, else by spaces. The word is in
    the first column and the tag in the last, unless ``reading`` gives their numbers. In files with tabs, lines that
    begin with # and have no tab are comments.

    Raises:
        DataError: if the file is not text, or a column is requested by a name.
    """
    begin, done_bytes = text_begin(path), 0
    conll = _Conll(reading, _has_tabs(read_head(path, _HEAD_BYTES)[begin:]))
    with open(descriptor_of(path), "rb") as file:
        file.seek(begin)
        for number, raw in _lines(file, reading.max_text_bytes):
            done_bytes = file.tell()
            if raw.isspace() or raw.startswith(_DOCUMENT.encode()):
                yield from conll.ended(done_bytes)
            else:
                conll.add(raw, number)
        yield from conll.ended(done_bytes)


def _has_tabs(head: bytes) -> bool:
    """Return whether the first line that certainly holds a word has a tab."""
    lines = (line for line in head.split(b"\n") if line.strip() and not line.startswith((b"#", _DOCUMENT.encode())))
    return b"\t" in next(lines, head)


class _Conll:
    """The sentence that is being read from a CoNLL file, to which lines are added."""

    def __init__(self, reading: Reading, has_tabs: bool) -> None:
        self._word_column, self._tag_column = _column(reading.text, 0), _column(reading.label, -1)
        self._most_bytes = reading.max_text_bytes
        self._has_tabs, self._num_columns = has_tabs, 0
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._number, self._num_bytes = number, 0
        self._why: str | None = None
        self._words: list[str] = []
        self._tags: list[str] = []

    def add(self, raw: bytes, number: int) -> None:
        """Add a line with a word and its tag to the sentence. ``number`` is the number of the line in the file."""
        if not self._words and self._why is None:
            self._begin(number)
        self._num_bytes += len(raw)
        if self._num_bytes > self._most_bytes:  # the rest of the sentence is not stored
            limit = format_bytes(self._most_bytes)
            self._why = self._why or f"no empty line follows within {limit}: put one after each sentence"
        if self._why is None:
            self._why = self._fault_of(raw.rstrip(b"\r\n"))
            if self._why is not None:
                self._number = number  # report the faulty line instead of the sentence's first line

    def ended(self, done_bytes: int) -> Iterator[Sentence]:
        """Yield the sentence that has been read, if it has any line, and start the next one."""
        if self._words or self._why is not None:
            yield Sentence(f"line {self._number}", self._words, self._tags, done_bytes, self._why)
        self._begin(0)

    def _fault_of(self, raw: bytes) -> str | None:
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8: convert the file"
        if self._has_tabs and line.startswith("#") and "\t" not in line:
            return None
        cells = line.split("\t") if self._has_tabs else [cell for cell in line.split(" ") if cell]
        self._num_columns = self._num_columns or len(cells)
        if len(cells) < 2 or len(cells) != self._num_columns:
            wanted = "at least 2: a word and its tag" if self._num_columns < 2 else f"{self._num_columns} before"
            return f"{line[:40]!r} has {len(cells)} column{'s' * (len(cells) != 1)}, not {wanted}: correct it"
        if max(self._word_column, self._tag_column) >= len(cells):
            return f"there is no column {max(self._word_column, self._tag_column) + 1} of {len(cells)}: give another"
        self._words.append(cells[self._word_column])
        self._tags.append(cells[self._tag_column])
        return None


def _column(asked: str | tuple[str, ...] | None, default: int) -> int:
    if asked is None:
        return default
    if not isinstance(asked, str) or not asked.isdecimal() or asked == "0":
        raise DataError(
            f"a file with one word per line has column numbers, not names, but {asked!r} is given: give a number from "
            "1, or leave it out (then the first is the word, the last the tag)"
        )
    return int(asked) - 1


def _lines(file: IO[bytes], most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines. A line that is too long is shortened, but still exceeds ``most_bytes``."""
    number = 0
    while raw := file.readline(most_bytes + 2):
        number += 1
        rest = raw
        while len(raw) > most_bytes + 1 and rest and not rest.endswith(b"\n"):
            rest = file.readline(most_bytes + 2)
        yield number, raw


def json_sentences(path: str, reading: Reading) -> Iterator[Sentence]:
    """Yield the sentences of JSON lines: the list of words and the list of tags of each object.

    Raises:
        DataError: if the file is not text, or the fields of the words and tags are ambiguous.
    """
    columns: tuple[str, str] | None = None
    begin = text_begin(path)
    with open(descriptor_of(path), "rb") as file:
        file.seek(begin)
        for number, raw in _lines(file, reading.max_text_bytes):
            if raw.isspace():
                continue
            place = f"line {number}"
            record = _parsed(raw, reading.max_text_bytes)
            if isinstance(record, str):
                yield Sentence(place, [], [], file.tell(), record)
                continue
            if columns is None:
                lists = [name for name, value in record.items() if isinstance(value, list)]
                columns = tagged_columns(reading, list(record), lists)
            if missing := [name for name in columns if name not in record]:
                yield Sentence(place, [], [], file.tell(), no_column(missing[0], list(record)))
                continue
            yield _sentence(place, record[columns[0]], record[columns[1]], None, file.tell())


def _parsed(raw: bytes, most_bytes: int) -> dict[str, Any] | str:
    """Return the object of a line, or the reason why it has no object."""
    if len(raw) > most_bytes + 1:
        return f"it has more than {format_bytes(most_bytes)}: split it into shorter sentences"
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8: convert the file"
    except json.JSONDecodeError as error:
        return f"it is not JSON ({error.msg} at character {error.colno}): correct it"
    except RecursionError:
        return "it is nested too deep: write lists of words and of tags"
    return record if isinstance(record, dict) else f"it is {type(record).__name__} and not an object: write {{...}}"


def table_sentences(table: Table, reading: Reading) -> Iterator[Sentence]:
    """Yield the rows of a table as sentences.

    Raises:
        DataError: if the columns of the words and tags are ambiguous, or do not hold lists.
    """
    schema = table.schema
    lists = [field.name for field in schema if _is_list(field.type)]
    try:
        columns = tagged_columns(reading, schema.names, lists)
    except DataError as error:
        raise DataError(f"cannot use {table.name}: {error}") from None
    if others := [name for name in columns if name not in lists]:
        kind = schema.field(others[0]).type
        raise DataError(f"the column {others[0]!r} of {table.name} holds {kind} and no lists: give a column of lists")
    names, number = _class_names(schema, columns[1]), 0
    for batch, done_bytes in table.batches(list(columns)):
        words, tags = (batch.column(name).to_pylist() for name in columns)
        for of_words, of_tags in zip(words, tags, strict=True):
            number += 1
            yield _sentence(f"row {number}", of_words, of_tags, names, done_bytes)


def _is_list(kind: Any) -> bool:
    types = pyarrow.types
    return any(is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _class_names(schema: Any, column: str) -> Sequence[str] | None:
    """Return the names of numbered tags that `datasets` stores in a file's schema; ``None`` if it has no names."""
    metadata = (schema.metadata or {}).get(_HUGGING_FACE)
    features = json.loads(metadata).get("info", {}).get("features", {}) if metadata else {}
    names = features.get(column, {}).get("feature", {}).get("names")
    return names if isinstance(names, list) else None


def _sentence(place: str, words: Any, tags: Any, names: Sequence[str] | None, done_bytes: int) -> Sentence:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return Sentence(place, [], [], done_bytes, f"its words are {str(words)[:40]!r}: write a list of texts")
    if not isinstance(tags, list) or not all(type(tag) in {str, int} for tag in tags):
        return Sentence(place, [], [], done_bytes, f"its tags are {str(tags)[:40]!r}: write a list of names or numbers")
    if names is not None and any(_is_number_without_name(tag, names) for tag in tags):
        return Sentence(
            place, [], [], done_bytes, f"a tag of {tags[:20]} is not from 0 to {len(names) - 1}: correct it"
        )
    named = [names[tag] if names is not None and isinstance(tag, int) and tag >= 0 else str(tag) for tag in tags]
    return Sentence(place, words, named, done_bytes)


def _is_number_without_name(tag: int | str, names: Sequence[str]) -> bool:
    return isinstance(tag, int) and str(tag) != NO_TAG and not 0 <= tag < len(names)


def tagged_columns(reading: Reading, columns: Sequence[str], of_lists: Sequence[str]) -> tuple[str, str]:
    """Return the columns of the words and of the tags: the requested columns, or the only possible columns.

    Raises:
        DataError: if a requested column is missing, or the choice is ambiguous.
    """
    if isinstance(reading.text, tuple) and len(reading.text) != 1:
        raise DataError(f"words are in one column, not in {len(reading.text)}: give text: <column>")
    for name in (*(reading.columns or ()), *filter(None, [reading.label])):
        if name not in columns:
            raise DataError(no_column(name, columns))
    lists = [name for name in of_lists if name != reading.label]
    words = reading.columns[0] if reading.columns else next((name for name in WORDS_NAMES if name in lists), None)
    if words is None:
        raise DataError(
            f"none of its columns {listed(columns)} is a list called {' or '.join(WORDS_NAMES)}: give the column of "
            "the words with text: <column>"
        )
    tags = [reading.label] if reading.label else [name for name in lists if name != words]
    if len(tags) != 1:
        raise DataError(
            f"of its columns {listed(columns)}, {len(tags) or 'none'} could be the tags of {words!r}: give the column "
            "with label: <column>"
        )
    return words, tags[0]
