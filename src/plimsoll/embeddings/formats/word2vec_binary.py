"""Binary word2vec: a line with the number of words and the dimension, then each word, a space and its float32 vector.

https://github.com/tmikolov/word2vec/blob/master/word2vec.c (``-binary 1``) writes a newline after each vector; gensim's
``save_word2vec_format(binary=True)`` does not. Newlines before a word are ignored, as in gensim. Vectors are
little-endian. The file is read once from start to end, so it may be compressed. Bytes after the number of words stated
in the header are ignored.

Does NOT support files without the header, or vectors of other data types. The format cannot store words with spaces or
newlines: the vectors after such a word are wrong. This is detected only if it makes a word that is not UTF-8, or a
number that is not finite.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats import Block, Rows, rows_of
from plimsoll.embeddings.formats.helpers.blocks import MAX_DIMENSION, Records, as_set, block_of, cut_at_records, cut_off
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.errors import EmbeddingError

TITLE = "word2vec binary"

_HEADER = re.compile(rb"[ \t]*(\d{1,18})[ \t]+(\d{1,18})[ \t\r]*\n")
_NUMBER = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE)
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_LONGEST_FIRST_WORD_BYTES = 1000


def recognises(head: bytes, source: Source) -> bool:
    """Return whether a file begins with a header, a word and a binary vector; see `Format`."""
    header = _HEADER.match(head)
    if header is None or int(header[1]) < 1 or int(header[2]) < 1:
        return False
    begin, dimension = header.end(), int(header[2])
    for _ in range(2):
        stop = _word_stop(head, begin)
        if stop is None:
            break
        if stop < 0:
            return False
        begin = stop + 1 + 4 * dimension
    return not _is_text(head[header.end() :], dimension)


def _word_stop(head: bytes, begin: int) -> int | None:
    """Return the offset at which the word at ``begin`` ends: -1 if it is too long, ``None`` if ``head`` ends first."""
    stop = head.find(b" ", begin, begin + _LONGEST_FIRST_WORD_BYTES)
    if stop < 0 and begin + _LONGEST_FIRST_WORD_BYTES > len(head):
        return None
    return stop


def _is_text(body: bytes, dimension: int) -> bool:
    numbers = body.partition(b"\n")[0].split()[-dimension:]
    if len(numbers) == dimension and all(map(_NUMBER.fullmatch, numbers)):
        return True
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":  # the last letter may be incomplete
            return False
    return not _CONTROLS.search(body)


def open_vectors(source: Source) -> _Binary:
    """Read the header; see `Format`."""
    header = _HEADER.match(source.head)
    if header is None:
        line = source.head.partition(b"\n")[0][:40]
        raise EmbeddingError(
            f"{source.name} begins with {line!r}, not with the numbers of words and dimensions as in binary "
            "word2vec: download it again, or save it again with gensim's save_word2vec_format(binary=True)"
        )
    dimension = int(header[2])
    if not 0 < dimension <= MAX_DIMENSION:
        raise EmbeddingError(
            f"{source.name} has a header with dimension {dimension}, which must be 1 to {MAX_DIMENSION}: "
            "download it again"
        )
    return _Binary(source, int(header[1]), dimension, header.end())


class _Binary:
    num_parts = 0
    counted = "word"
    first_number = 1

    def __init__(self, source: Source, num_promised: int, dimension: int, begin: int) -> None:
        self._source, self._begin, self._share = source, begin, 0.0
        self.num_promised, self.dimension = num_promised, dimension

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield parts of complete records, of about 1 MiB each; see `Vectors`."""
        wanted, num_words = as_set(wanted), 0
        records = Records(b" ", 4 * self.dimension)
        for raw, words, ends, share in cut_at_records(self._source, records, self._begin, self.num_promised):
            num_words, self._share = num_words + len(words), share
            yield partial(self._block, raw, words, ends, wanted)
        self._share = 1.0
        if num_words < self.num_promised or self._source.is_cut:
            yield partial(cut_off, 0, f"{num_words} of {self.num_promised} words")

    def _block(
        self, raw: bytes, words: list[bytes], ends: NDArray[np.int64], wanted: Collection[bytes] | None
    ) -> Block:
        words = [word.lstrip(b"\n") for word in words]
        num_bytes = 4 * self.dimension
        starts = ends - num_bytes

        def rows_at(places: NDArray[np.int64]) -> Rows:
            windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(raw, np.uint8), num_bytes)
            return rows_of(windows[starts[places]].view("<f4").astype(np.float32, copy=False))

        return block_of(words, wanted, rows_at)

    def share_read(self) -> float:
        """Return the share of the file that has been read; see `Vectors`."""
        return self._share

    def build(self, words: list[bytes]) -> None:
        """Return ``None``: the format cannot build vectors of other words; see `Vectors`."""
