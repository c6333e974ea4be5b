"""GloVe text: a word and the values of its vector per line, separated by single spaces, without a header.

Written as ``vectors.txt`` by https://github.com/stanfordnlp/GloVe, and published as ``glove.6B.300d.txt`` and similar
files. Words may contain spaces (``glove.840B.300d.txt`` has ``. . .``), no-break spaces and bytes that are not UTF-8.
The dimension is the number of values in most of the first lines. Tabs may separate fields in place of spaces.
"""

from __future__ import annotations

import re

from plimsoll.embeddings.formats.helpers.lines import Layout, Lines, dimension_of, separator_of
from plimsoll.embeddings.formats.helpers.sources import Source

TITLE = "GloVe text"
_HEADER = re.compile(rb"\d+[ \t]+\d+\s*\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def recognises(head: bytes, source: Source) -> bool:
    """Return whether the first lines of the file end with numbers; see `Format`."""
    return b"\0" not in head and _dimension(head) > 0


def open_vectors(source: Source) -> Lines:
    """Open a file of lines without a header; see `Format`."""
    begin = len(_BYTE_ORDER_MARK) if source.head.startswith(_BYTE_ORDER_MARK) else 0
    first_line = source.head.split(b"\n", 1)[0]
    return Lines(source, Layout(_dimension(source.head), separator_of(first_line), begin))


def _dimension(head: bytes) -> int:
    """Return the number of values in most lines, ignoring a first line that may be the header of another format."""
    header = _HEADER.match(head)
    return dimension_of(head[header.end() :] if header else head)
