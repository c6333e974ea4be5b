"""Formats of text files: one module per format, each with the functions of `Format`.

There are two kinds:

- Plain text, jsonl and csv are read in place and only indexed. Their module finds where each text begins in any byte
  range of a file, so that ranges can be scanned in parallel. It also decodes the bytes of a text.
- Parquet, Arrow, compressed files and Hugging Face data sets are converted once into a store of the format `packed`
  (`plimsoll.data.text.convert`).

To add a format that is only indexed, add a module here, name it in `plimsoll.data.text.scan`, and add its suffix to
`plimsoll.data.text.convert.format_of`. The contract tests run over every module of this folder. To add a converted
format, add a function to `plimsoll.data.text.tables.OPENERS` and its suffix to `plimsoll.data.text.convert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Unit = Literal["document", "line", "paragraph"]


@dataclass(frozen=True)
class Reading:
    """The rules for reading files: the unit of a text, its columns, and the handling of faults.

    Attributes:
        unit: the extent of a text in plain text files: the whole file, a line, or a paragraph between blank lines
            (white space only). In tables every row is a text, and this option is ignored.
        text: the column of a table with the texts, or several columns (joined by newlines). ``None``: the column
            ``text``, or the only column of strings. The columns of a csv without a header are called ``1``, ``2``, ...
        label: the column with the classes, or ``None`` if the texts have no classes.
        escapes: in csv and tsv, decode ``\\n``, ``\\t``, ``\\r`` and ``\\\\`` as Python does.
        quotes: whether double quotes in csv and tsv are special. ``False``: every line is a row, and a quote is an
            ordinary character.
        header: whether the first row of a csv names its columns. ``None``: decided from the first row. It names the
            columns if it holds the requested names. It does not if the requested names are numbers, or if one of its
            cells is a number. Otherwise an error is raised.
        on_error: ``stop``: unreadable data raises an error; ``skip``: unreadable rows (or files, if a text is a file)
            are left out, counted and listed.
        max_text_bytes: a longer line, paragraph or row counts as unreadable.
        is_tagged: each word of a text has a tag (`plimsoll.data.text.sentences`). ``text`` is the column of words,
            ``label`` the column of their tags. Files that are not tables are read in CoNLL format.
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
        """The columns requested for the text; ``None`` if none is requested."""
        return (self.text,) if isinstance(self.text, str) else self.text


class Layout(NamedTuple):
    """The properties of a file that are needed to decode its texts; serializable as JSON.

    ``columns`` are the columns of the text, and ``label`` is the column of the classes: an index in csv, else a name.
    ``label`` is ``None`` if the texts have no classes.
    """

    format: str
    unit: Unit = "document"
    columns: tuple[int | str, ...] = ()
    label: int | str | None = None
    num_columns: int = 0
    delimiter: str = ","
    escapes: bool = False
    quotes: bool = True


class Part(NamedTuple):
    """The byte range ``begin`` to ``end`` of a file, to be scanned for texts.

    ``first`` is the first byte at which a text may begin (after a byte order mark or a header). ``quoting`` is the
    state of csv quoting at the byte ``begin`` (`plimsoll.data.formats.csv`).
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
    """The reason why the text at byte ``at`` of a file cannot be read, and the remedy.

    ``line`` is counted from 0 at the beginning of the scanned part; ``None`` if the line is not known.
    """

    at: int
    why: str
    remedy: str
    line: int | None = None


class Labels(NamedTuple):
    """The classes of the texts of a part: text ``i`` has the class ``names[codes[i]]``."""

    names: list[str | int]
    codes: NDArray[np.uint32]


class Found(NamedTuple):
    """The result of scanning a part.

    ``starts`` holds the byte offsets of its texts in ascending order, including faulty and empty texts. ``is_empty``
    marks the empty texts. ``digest`` is a hash of the bytes of the part. ``is_blank`` is set if the whole part is white
    space. ``suspects`` are texts that can be read, but may be mistakes in the file, such as unintended quotes.

    For paragraphs, ``starts`` holds the offset after each newline of the part. ``inks`` tells for each stretch before,
    between and after these newlines whether it holds more than white space.
    `plimsoll.data.formats.text.Paragraphs` computes paragraphs from ``starts`` and ``inks``.
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
    """The interface of a format module in this folder."""

    def look(self, path: str, reading: Reading) -> tuple[Layout, int]:
        """Inspect the beginning of a file; return its layout and the offset of the first byte that may begin a text.

        Raises:
            DataError: if no text can be found in the file. The caller adds the name of the file to the message.
        """
        ...

    def scan(self, part: Part) -> Found:
        """Find the texts that begin in a part, and check all bytes of the part for faults."""
        ...

    def decode(self, raws: list[bytes], layout: Layout) -> list[str]:
        """Return the texts of ``raws``: each item holds the bytes from the start of a text to the start of the next.

        Raises:
            ValueError: if the bytes of a text differ from the indexed content.
        """
        ...

    def decode_run(self, raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
        """Return consecutive texts from one bytes object: text ``i`` is ``raw[borders[i] : borders[i + 1]]``.

        Raises:
            ValueError: if the texts differ from the indexed content.
        """
        ...
