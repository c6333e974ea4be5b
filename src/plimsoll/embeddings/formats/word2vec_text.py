"""word2vec's text: a line with the number of words and the dimension, then a word and its numbers per line.

As written by the original C tool, by gensim's ``save_word2vec_format`` and by fastText as ``.vec``, which ends lines in
a space. The header tells it from GloVe's text: two whole numbers, the second of which the next line agrees with.
"""

from __future__ import annotations

from plimsoll.embeddings.formats._lines import Layout, Lines, dimension_of, separator_of
from plimsoll.embeddings.formats._sources import Source

TITLE = "word2vec text (fastText .vec)"


def recognises(head: bytes, source: Source) -> bool:
    """Whether the first line holds two whole numbers, and the lines behind it end in so many numbers."""
    return b"\0" not in head and _layout(head) is not None


def open_vectors(source: Source) -> Lines:
    """Open a file of lines with a header."""
    layout = _layout(source.head)
    assert layout is not None
    return Lines(source, layout)


def _layout(head: bytes) -> Layout | None:
    header, newline, rest = head.partition(b"\n")
    fields = header.split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    num_words, dimension = map(int, fields)
    first_line = rest.split(b"\n", 1)[0]
    if not newline or dimension < 1 or (rest.strip() and dimension_of(rest) != dimension):
        return None
    return Layout(dimension, separator_of(first_line), len(header) + 1, 2, num_words)
