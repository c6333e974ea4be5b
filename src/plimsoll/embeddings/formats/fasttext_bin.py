"""fastText models (``.bin``): a dictionary, then the vectors of words and of buckets of character n-grams.

https://github.com/facebookresearch/fastText/tree/main/src (args.cc, dictionary.cc, densematrix.cc, ``loadModel`` in
fasttext.cc), versions 11 and 12. The vector of a word is the mean of its own row and the rows of its n-grams, bitwise
identical to ``get_word_vector``. A word that is not in the dictionary gets the mean of the rows of its n-grams.

The matrix is mapped, and only needed rows are read. A compressed file is unpacked to a temporary file, which exists as
long as the vectors are open. Labels of supervised models are not words. The output matrix is not read and may be
missing.

Does NOT support quantized models (``.ftz``), models older than version 11, whose files have no magic number, and
sent2vec models.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats import Block, Rows, rows_of
from plimsoll.embeddings.formats.helpers.blocks import MAX_DIMENSION, MAX_WORD_BYTES, Records, as_set, block_of
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.embeddings.formats.helpers.subwords import MAX_NGRAM_LETTERS, Ngrams, are_usable, sums
from plimsoll.errors import EmbeddingError

TITLE = "fastText .bin"

_MAGIC = struct.pack("<i", 793712314)
_HEADER = struct.Struct("<14id3iqq")
_MATRIX = struct.Struct("<?qq")
_VERSIONS, _SUPERVISED = (11, 12), 3
_RECORDS = Records(b"\0", 9)  # after the word: a count in 8 bytes, and a byte that distinguishes words from labels
_PART_BYTES = 1 << 20
_END_OF_SENTENCE = b"</s>"


def recognises(head: bytes, source: Source) -> bool:
    """Return whether a file begins with fastText's magic number; see `Format`."""
    return head.startswith(_MAGIC)


def open_vectors(source: Source) -> _Model:
    """Read the header and the dictionary, and map the matrix; see `Format`."""
    with ExitStack() as stack:
        model = _Model(source, stack.enter_context(source.as_file()))
        weakref.finalize(model, stack.pop_all().close)
        return model


class _Header(NamedTuple):
    version: int
    dimension: int
    ngrams: Ngrams
    num_entries: int
    num_words: int


class _Part(NamedTuple):
    """A part of the dictionary: its begin and end as offsets in the file, and the index of its first entry."""

    begin: int
    end: int
    first: int


class _Model:
    num_parts = 0
    counted = "word"
    first_number = 1

    def __init__(self, source: Source, path: Path) -> None:
        self._source, self._path, self._share = source, path, 0.0
        header = _read_header(source.name, path)
        self.dimension, self.num_promised, self._ngrams = header.dimension, header.num_words, header.ngrams
        self._parts = list(_parts(source.name, path, header.num_entries))
        begin = self._parts[-1].end if self._parts else _HEADER.size
        self._matrix = _matrix(source.name, path, begin, header)

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield parts of about 1 MiB of the dictionary each; see `Vectors`."""
        wanted = as_set(wanted)
        for part in self._parts:
            if part.first < self.num_promised:
                self._share = part.end / self._parts[-1].end
                yield partial(self._block, part, wanted)
        self._share = 1.0

    def _block(self, part: _Part, wanted: Collection[bytes] | None) -> Block:
        words, _ = _RECORDS.split(_read(self._path, part.begin, part.end - part.begin))
        words = words[: self.num_promised - part.first]

        def rows_at(places: NDArray[np.int64]) -> Rows:
            chosen = [words[place] for place in places]
            return rows_of(self._means(chosen, places + part.first)[0])

        return block_of(words, wanted, rows_at)

    def _means(
        self, words: list[bytes], own_rows: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        matrix = self._matrix
        total, counts = sums(words, own_rows, self.num_promised, self._ngrams, (matrix, matrix))
        total *= (1.0 / np.maximum(counts, 1)).astype(np.float32)[:, None]  # fastText multiplies by the inverse
        return total, counts

    def share_read(self) -> float:
        """Return the share of the dictionary that the parts yielded so far cover; see `Vectors`."""
        return self._share

    def build(self, words: list[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Return for each word the mean of its n-grams' vectors; see `Vectors`."""
        means, counts = self._means(words, None)
        return are_usable(means, counts), means


def _read(path: Path, begin: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(num_bytes)


def _read_header(name: str, path: Path) -> _Header:
    raw = _read(path, 0, _HEADER.size)
    if len(raw) < _HEADER.size:
        raise EmbeddingError(f"{name} is cut off after {len(raw)} bytes, in its header: download it again")
    numbers = _HEADER.unpack(raw)
    version, dimension, kind, bucket, minn, maxn = (numbers[place] for place in (1, 2, 9, 10, 11, 12))
    num_entries, num_words, num_labels, _, num_pruned = numbers[15:]
    if version not in _VERSIONS:
        raise EmbeddingError(
            f"{name} is a fastText model of version {version}, but only versions 11 and 12 can be read: save its "
            "vectors as text (fastText writes a .vec file with each .bin), and use that file"
        )
    if version == 11 and kind == _SUPERVISED:
        maxn = 0  # as in fastText's loadModel
    is_sound = 0 < dimension <= MAX_DIMENSION and 0 <= maxn <= MAX_NGRAM_LETTERS and minn >= 0 and bucket >= 0
    if not is_sound or num_words < 0 or num_labels < 0 or num_entries != num_words + num_labels:
        raise EmbeddingError(
            f"{name} has a damaged header (dimension {dimension}, n-grams of {minn} to {maxn} letters in {bucket} "
            f"buckets, {num_words} words and {num_labels} labels of {num_entries}): download it again"
        )
    if num_pruned >= 0:
        raise _quantized(name, f"its dictionary was pruned to {num_pruned} n-grams")
    return _Header(version, dimension, Ngrams(minn, maxn, bucket, _END_OF_SENTENCE), num_entries, num_words)


def _quantized(name: str, why: str) -> EmbeddingError:
    return EmbeddingError(
        f"{name} is a quantized fastText model ({why}), whose vectors are not exact: use the original .bin "
        "file, or save its vectors as text, with `fasttext print-word-vectors`, and use that file"
    )


def _parts(name: str, path: Path, num_entries: int) -> Iterator[_Part]:
    """Yield the parts of the dictionary, of complete entries in about 1 MiB each."""
    begin, first = _HEADER.size, 0
    while first < num_entries:
        raw = _read(path, begin, _PART_BYTES)
        words, ends = _RECORDS.split(raw)
        words, ends = words[: num_entries - first], ends[: num_entries - first]
        if not words:
            why = "is damaged" if len(raw) > MAX_WORD_BYTES else "is cut off"
            raise EmbeddingError(
                f"{name} {why} in its dictionary, after {first} of {num_entries} words: download it again"
            )
        yield _Part(begin, begin + int(ends[-1]), first)
        begin, first = begin + int(ends[-1]), first + len(words)


def _matrix(name: str, path: Path, begin: int, header: _Header) -> NDArray[np.float32]:
    raw = _read(path, begin, _MATRIX.size)
    is_quantized, num_rows, dimension = _MATRIX.unpack(raw.ljust(_MATRIX.size, b"\0"))
    if is_quantized:
        raise _quantized(name, "its matrix is compressed")
    num_ngram_rows = 0 if header.ngrams.are_none else header.ngrams.num_buckets
    begin += _MATRIX.size
    num_bytes, there_bytes = 4 * num_rows * dimension, max(path.stat().st_size - begin, 0)
    if len(raw) == _MATRIX.size and (dimension != header.dimension or num_rows < header.num_words + num_ngram_rows):
        raise EmbeddingError(
            f"{name} is damaged: its matrix is {num_rows} x {dimension}, and {header.num_words} words and "
            f"{num_ngram_rows} buckets of dimension {header.dimension} need another shape: download it again"
        )
    if len(raw) < _MATRIX.size or there_bytes < num_bytes:
        raise EmbeddingError(
            f"{name} is cut off: it has {there_bytes} of {num_bytes} bytes of its matrix; download it again"
        )
    if not num_bytes:
        return np.empty((0, header.dimension), np.float32)
    return np.memmap(path, "<f4", "r", begin, (num_rows, dimension))
