"""How texts lie in files: one module per format, each with the functions of `Format`.

Two kinds. Texts that can be read where they are (plain text, jsonl, csv) are only indexed: a module finds where each
text begins in any byte range of a file, so that ranges are scanned in parallel, and turns the bytes of a text into the
text. Texts that cannot (parquet, Arrow, compressed files, data sets of Hugging Face) are converted once into a store of
the format `packed`, see `plimsoll.data.text.convert`.

To add a format that is only indexed, add a module here, name it in `plimsoll.data.text.scan`, and give its suffix to
`plimsoll.data.text.convert.format_of`. The contract tests run over every module of this folder. To add one that is
converted, add a function to `plimsoll.data.text.tables.OPENERS` and its suffix to `plimsoll.data.text.convert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Unit = Literal["document", "line", "paragraph"]


@dataclass(frozen=True)
class Reading:
    """What of the files is a text, and what happens to what is none.

    Attributes:
        unit: of plain text: a file, what stands between two newlines, or lines between blank lines (of white space
            only). In tables every row is a text, whatever is said here.
        text: the column of a table with the texts, or several (joined by newlines). ``None``: the column ``text``, or
            the only one that holds strings. Where a csv has no header, columns are called ``1``, ``2``, ...
        label: the column with the classes; ``None``: there is none.
        escapes: in csv and tsv, ``\\n``, ``\\t``, ``\\r`` and ``\\\\`` stand for the characters they mean in Python.
        quotes: whether double quotes in csv and tsv have a meaning; ``False``: every line is a row, and a quote a
            character like others.
        header: whether the first row of a csv names its columns; ``None``: it does if it names those asked for, does
            not if they are numbers or a cell of the first row is a number; otherwise that is an error.
        on_error: ``stop``: what cannot be read is an error; ``skip``: rows that cannot be read (files, where a text is
            a file) are left out, counted and listed.
        max_text_bytes: a longer line, paragraph or row is one of those that cannot be read.
        is_tagged: texts are words with a tag each (`plimsoll.data.text.sentences`): ``text`` is the column of words,
            ``label`` that of their tags; what is no table is a file of the CoNLL kind.
    """

    unit: Unit = "document"
    text: str | tuple[str, ...] | None = None
    label: str | None = None
    escapes: bool = False
    quotes: bool = True
    header: bool | None = None
    on_error: Literal["stop", "skip"] = "stop"
    max_text_bytes: int = 64 << 20
    is_tagged: bool = False

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns asked for."""
        return (self.text,) if isinstance(self.text, str) else self.text


class Layout(NamedTuple):
    """What must be known of a file to turn the bytes of a text into the text; as small as JSON."""

    format: str
    unit: Unit = "document"
    columns: tuple[int | str, ...] = ()
    label: int | str | None = None
    num_columns: int = 0
    delimiter: str = ","
    escapes: bool = False
    quotes: bool = True


class Part(NamedTuple):
    """The bytes ``begin`` to ``end`` of a file, in which texts are to be found.

    ``first`` is where the first text of the file may begin (behind a byte order mark or a header); ``quoting`` says
    how the byte ``begin`` of a csv stands to its quotes (`plimsoll.data.formats.csv`).
    """

    path: str
    begin: int
    end: int
    num_file_bytes: int
    layout: Layout
    max_text_bytes: int
    first: int = 0
    quoting: int = 0


class Fault(NamedTuple):
    """Why the text that holds the byte ``at`` cannot be read, and what to do; ``line`` counts from the part's begin."""

    at: int
    why: str
    remedy: str
    line: int | None = None


class Labels(NamedTuple):
    """The classes of the texts of a part: ``names[codes[i]]``."""

    names: list[str | int]
    codes: NDArray[np.uint32]


class Found(NamedTuple):
    """What a part holds: where texts begin, ascending, those of faults included, and those that ``is_empty`` marks.

    ``is_blank``: all of it is white space. For paragraphs ``starts`` are the begins of all lines behind the newlines of
    the part, and ``inks`` says of the bytes before, between and after these newlines whether they are more than white
    space; `plimsoll.data.formats.text.Paragraphs` makes texts of that. ``suspects`` are texts that can be read and may
    not be what was meant.
    """

    starts: NDArray[np.int64]
    digest: bytes
    faults: tuple[Fault, ...] = ()
    num_lines: int = 0
    is_blank: bool = False
    inks: NDArray[np.bool_] | None = None
    is_empty: NDArray[np.bool_] | None = None
    labels: Labels | None = None
    suspects: tuple[Fault, ...] = ()


class Format(Protocol):
    """What a module of this folder offers."""

    def look(self, path: str, reading: Reading) -> tuple[Layout, int]:
        """Look at the begin of a file; return its layout and the first byte that may begin a text.

        Raises:
            DataError: if no text can be found in it; the message names no file.
        """
        ...

    def scan(self, part: Part) -> Found:
        """Find the texts that begin in a part, and check all bytes of it."""
        ...

    def decode(self, raws: list[bytes], layout: Layout) -> list[str]:
        """Return the texts of some spans; a span reaches from the begin of its text to that of the next.

        Raises:
            ValueError: if a span is not what was indexed.
        """
        ...

    def decode_run(self, raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
        """Return consecutive texts from the bytes of all their spans, which are ``raw[borders[i] : borders[i + 1]]``.

        Raises:
            ValueError: if they are not what was indexed.
        """
        ...
