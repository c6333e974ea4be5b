"""word2vec text: a line with the number of words and the dimension, then a word and the values of its vector per line.

Written by the original C tool, by gensim's ``save_word2vec_format`` and by fastText as ``.vec``, whose lines end with a
space. The header distinguishes it from GloVe text: two integers, of which the second is the number of values in each
following line. A file that ends within the first line after the header is recognised, too, and reported as truncated.
"""

from __future__ import annotations

import re

from plimsoll.embeddings.formats.helpers.lines import Layout, Lines, dimension_of, separator_of
from plimsoll.embeddings.formats.helpers.sources import Source

_MOST_DIGITS = 18
TITLE = "word2vec text (fastText .vec)"
_BEGIN_OF_NUMBER = re.compile(rb"[-+0-9.eEnaif]*")


def recognises(head: bytes, source: Source) -> bool:
    """Return whether the first line has two integers, and the second is the number of values in the next lines."""
    return b"\0" not in head and _layout(head) is not None


def open_vectors(source: Source) -> Lines:
    """Open a file of lines with a header; see `Format`."""
    layout = _layout(source.head)
    assert layout is not None
    return Lines(source, layout)


def _layout(head: bytes) -> Layout | None:
    header, _, rest = head.partition(b"\n")
    fields = header.split()
    if len(fields) != 2 or not all(field.isdigit() and len(field) <= _MOST_DIGITS for field in fields):
        return None
    num_words, dimension = map(int, fields)
    first_line, newline, _ = rest.partition(b"\n")
    separator = separator_of(first_line)
    agrees = dimension_of(rest) == dimension if newline else _may_begin(first_line, separator, dimension)
    if dimension < 1 or not (agrees or not rest.strip()):
        return None
    return Layout(dimension, separator, len(header) + 1, 2, num_words)


def _may_begin(line: bytes, separator: int, dimension: int) -> bool:
    """Return whether an incomplete line can be the beginning of a line with a word and ``dimension`` numbers."""
    fields = line.rstrip().split(bytes([separator]))[1:]
    return len(fields) <= dimension and all(_BEGIN_OF_NUMBER.fullmatch(field) for field in fields)
