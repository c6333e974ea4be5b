"""Files saved by gensim: ``KeyedVectors``, and the word vectors of ``Word2Vec``, ``FastText`` and ``Doc2Vec`` models.

https://github.com/piskvorky/gensim/blob/develop/gensim/utils.py (``SaveLoad``): a pickle, with large arrays in separate
files next to it, ``<file>.vectors.npy`` or ``<file>.wv.vectors.npy``. Supports gensim 0.12 to 4. The pickle is only
parsed and never executed (`files.pickles`), so a malicious file cannot run code. Arrays inside and outside the pickle
are memory-mapped.

The vectors of a FastText model are bitwise identical to gensim's. If gensim 4 saved the model, a word that is not in it
gets the mean of the vectors of its n-grams, as in gensim. Earlier versions use other n-grams and hashes.

Does NOT support document vectors, compressed arrays in separate files (``.npz``, written if the name ends in .gz),
sent2vec models, and annoy indexes.
"""

from __future__ import annotations

import mmap
import re
import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats.helpers.mapped import Mapped, gathered, in_pieces, mapped_array, require_vectors
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.embeddings.formats.helpers.subwords import MAX_NGRAM_LETTERS, Ngrams, are_usable, sums
from plimsoll.errors import EmbeddingError
from plimsoll.files.pickles import BrokenPickle, Span, Thing, described

TITLE = "gensim"

_WORDS, _VECTORS = (b"index_to_key", b"index2word", b"index2entity"), (b"vectors", b"syn0")
_OTHERS = (
    b"min_n",
    b"max_n",
    b"bucket",
    b"wv",
    b"vectors_vocab",
    b"vectors_ngrams",
    b"compatible_hash",
    b"hash2index",
    b"__numpys",
)
_KEYS = frozenset((*_WORDS, *_VECTORS, *_OTHERS))
_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_FIRST_CLASS_BYTES = 256  # the class name is at the start of a pickle
_ARRAY_MAKERS = re.compile(rb"numpy\.(_?core\.multiarray\._reconstruct|_?core\.numeric\._frombuffer)")
_FLOAT = re.compile(rb"[<>=|]?f[248]")


def recognises(head: bytes, source: Source) -> bool:
    """Return whether a file begins like a pickle of a gensim object; see `Format`."""
    return head.startswith(_PROTOCOLS) and b"gensim." in head[:_FIRST_CLASS_BYTES]


def open_vectors(source: Source) -> Mapped:
    """Read the words and map the arrays; see `Format`."""
    with ExitStack() as stack:
        path = stack.enter_context(source.as_file())
        with path.open("rb") as file:
            raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        vectors = _opened(_Saved(source, raw))
        weakref.finalize(vectors, stack.pop_all().close)
        return vectors


class _Saved:
    """The content of a pickled gensim object with word vectors.

    Attributes:
        name: the name of the file.
        words: the words in row order.
    """

    def __init__(self, source: Source, raw: mmap.mmap) -> None:
        self._source, self._raw, self.name = source, raw, source.name
        try:
            whole = described(raw, _KEYS)
        except BrokenPickle as error:
            raise EmbeddingError(
                f"{source.name} is not a complete pickle of protocol 2 to 5 (it {error}): download it again, or save "
                "it again with gensim 4"
            ) from None
        outer = _state(whole)
        inner = _state(outer.get(b"wv"))
        words = [(part, state[key]) for part, state in ((".wv", inner), ("", outer)) for key in _WORDS if key in state]
        if not words:
            what = whole.name.decode("utf-8", "replace") if isinstance(whole, Thing) else "an object without a class"
            raise EmbeddingError(
                f"{source.name} holds {what[:100]}, which has no list of words: save the "
                "KeyedVectors (`model.wv.save(path)`)"
            )
        self._prefix, self.words = words[0]
        self._state = inner if self._prefix else outer
        if not isinstance(self.words, list) or not all(type(word) is bytes for word in self.words):
            raise EmbeddingError(
                f"{source.name} has keys that are not words (numbers, or no keys): save the KeyedVectors of words, "
                "with `model.wv.save(path)`"
            )

    def number(self, key: bytes) -> int:
        """Return an integer attribute of the object; -1 if it has no such attribute."""
        value = self._state.get(key)
        return value if isinstance(value, int) else -1

    def has(self, key: bytes) -> bool:
        """Return whether the object has an attribute."""
        return key in self._state

    def array(self, *keys: bytes) -> NDArray[Any] | None:
        """Return the array of the first attribute in ``keys`` that is saved; ``None`` if no such array is saved.

        The array is in the pickle or in a separate file.
        """
        beside = self._state.get(b"__numpys")
        for key in keys:
            if isinstance(beside, list) and key in beside:
                return self._beside(key.decode())
            if isinstance(thing := self._state.get(key), Thing):
                return self._inside(key, thing)
        return None

    def _beside(self, key: str) -> NDArray[Any]:
        source = self._source
        path = Path(f"{source.path}{self._prefix}.{key}.npy")
        if source.packing:
            raise EmbeddingError(
                f"the {key} of {source.name} are in a separate file, which cannot be mapped if it is compressed: "
                "move all its files, unpacked, into one folder, or save it again under a name without .gz"
            )
        if not path.is_file():
            raise EmbeddingError(
                f"the {key} of {source.name} must be in the missing file {path.name} in the same folder: copy it "
                "there, under this name, or save the model again with gensim: `model.wv.save(path)`"
            )
        return mapped_array(path)

    def _inside(self, key: bytes, thing: Thing) -> NDArray[Any]:
        """Return the array of the attribute ``key``, which the pickle stores as ``thing``, uncopied if possible."""
        try:
            matrix = self._read_array(thing)
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise EmbeddingError(
                f"the {key.decode()} in {self._source.name} are not a floating-point array ({error}): save "
                "it again with gensim 4"
            ) from None
        require_vectors(f"{self._source.name} ({key.decode()})", matrix)
        return matrix

    def _read_array(self, thing: Thing) -> NDArray[Any]:
        if not _ARRAY_MAKERS.fullmatch(thing.name):
            raise TypeError("it was not saved by numpy")
        if thing.name.endswith(b"_frombuffer"):
            data, kind, shape, order = thing.args
        else:
            _, shape, kind, is_fortran, data = thing.state
            order = b"F" if is_fortran else b"C"
        code = _text(kind.args[0])
        if not _FLOAT.fullmatch(code):
            raise TypeError(f"its type is {code[:10]!r}")
        dtype = np.dtype(code.decode()).newbyteorder(">" if _text(kind.state[1]) == b">" else "<")
        shape = tuple(int(number) for number in shape)
        return self._numbers(data, dtype).reshape(shape, order="F" if order == b"F" else "C")

    def _numbers(self, data: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        if isinstance(data, Thing) and data.name == b"_codecs.encode":  # protocol 2 has no type for bytes
            data = self._bytes(data.args[0]).decode("utf-8").encode("latin-1")
        if isinstance(data, Span):
            return np.frombuffer(self._raw, dtype, (data.end - data.begin) // dtype.itemsize, data.begin)
        return np.frombuffer(_text(data), dtype)

    def _bytes(self, data: Any) -> bytes:
        return self._raw[data.begin : data.end] if isinstance(data, Span) else _text(data)


def _state(thing: Any) -> dict[bytes, Any]:
    return thing.state if isinstance(thing, Thing) and isinstance(thing.state, dict) else {}


def _text(value: Any) -> bytes:
    if type(value) is not bytes:
        raise TypeError("a value is not text")
    return value


class _Subwords(NamedTuple):
    """The n-grams of a FastText model, and the vectors of their buckets, (buckets, dimension)."""

    ngrams: Ngrams
    matrix: NDArray[np.float32]


def _opened(saved: _Saved) -> Mapped:
    subwords = _subwords(saved)
    build = None if subwords is None else partial(_built, subwords)
    matrix = saved.array(*_VECTORS)
    if matrix is not None:
        read = partial(gathered, matrix)
    else:
        matrix = saved.array(b"vectors_vocab")
        if matrix is None or (subwords is None and saved.number(b"bucket") != 0):
            raise EmbeddingError(
                f"{saved.name} has {len(saved.words)} words, but their vectors are missing or in an unknown form: load "
                "it with the gensim that saved it, and save its vectors with `model.wv.save_word2vec_format(path)`"
            )
        read = partial(gathered, matrix) if subwords is None else partial(_composed, saved.words, matrix, subwords)
    if len(matrix) < len(saved.words):
        raise EmbeddingError(
            f"{saved.name} has {len(saved.words)} words but {len(matrix)} vectors: use the files "
            "that were saved together"
        )
    return Mapped(lambda: in_pieces(saved.words), len(saved.words), matrix.shape[1], read, build)


def _subwords(saved: _Saved) -> _Subwords | None:
    """Return the n-grams of a model saved by gensim 4, where each bucket has a row and the hash is fastText's.

    Return ``None`` for other models, and for a model without usable n-grams.
    """
    if saved.number(b"compatible_hash") != 1 or saved.has(b"hash2index"):
        return None
    ngrams = Ngrams(saved.number(b"min_n"), saved.number(b"max_n"), saved.number(b"bucket"))
    matrix = saved.array(b"vectors_ngrams")
    if ngrams.are_none or ngrams.max_letters > MAX_NGRAM_LETTERS or matrix is None or len(matrix) < ngrams.num_buckets:
        return None
    return _Subwords(ngrams, matrix)


def _composed(
    words: list[bytes], own: NDArray[np.float32], subwords: _Subwords, rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    chosen = [words[row] for row in rows]
    total, counts = sums(chosen, rows, 0, subwords.ngrams, (own, subwords.matrix))
    return total / np.maximum(counts, 1).astype(np.float32)[:, None]  # gensim divides; fastText does not


def _built(subwords: _Subwords, words: list[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    total, counts = sums(words, None, 0, subwords.ngrams, (subwords.matrix, subwords.matrix))
    return are_usable(total, counts), total / np.maximum(counts, 1).astype(np.float32)[:, None]
