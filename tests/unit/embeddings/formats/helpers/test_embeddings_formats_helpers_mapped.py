"""An array with a separate list of words: parts of the words, rows of the array."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.formats.helpers import mapped
from plimsoll.embeddings.formats.helpers.mapped import Mapped, gathered, in_pieces, mapped_array, require_vectors
from plimsoll.errors import EmbeddingError
from vector_files import read_all


def test_words_come_in_pieces_and_rows_with_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mapped, "_WORDS_AT_ONCE", 3)
    words, matrix = [b"%d" % number for number in range(8)], np.arange(16.0).reshape(8, 2)
    vectors = Mapped(lambda: in_pieces(words), 8, 2, partial(gathered, matrix))
    assert [part().num_words for part in vectors.parts(None)] == [3, 3, 2]
    assert (read_all(vectors).matrix == matrix).all()
    assert (read_all(vectors, {b"2", b"7"}).matrix == matrix[[2, 7]]).all()
    assert vectors.build([b"x"]) is None
    built = np.array([True]), np.ones((1, 2), np.float32)
    assert Mapped(lambda: in_pieces(words), 8, 2, partial(gathered, matrix), lambda _: built).build([b"x"]) is built


def test_large_numbers_become_infinite_without_a_warning():
    rows = gathered(np.array([[1e300, -1e300, 1]]), np.array([0]))
    assert rows.dtype == np.float32
    assert rows.tolist() == [[np.inf, -np.inf, 1]]


def test_an_array_is_mapped_or_an_error(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    assert isinstance(mapped_array(tmp_path / "a.npy"), np.memmap)
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00__import__('os')")
    raw = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "c.npy").write_bytes(raw.replace(b"}", b"{"))  # numpy raises the error of its tokenizer for this header
    for name in ("b.npy", "c.npy"):
        with pytest.raises(EmbeddingError, match=f"cannot map .*{name} as an array"):
            mapped_array(tmp_path / name)
    for matrix, why in ((np.ones(3), "the shape"), (np.ones((1, 1), int), "holds int64")):
        with pytest.raises(EmbeddingError, match=f"^x {why if why != 'the shape' else 'has the shape'}"):
            require_vectors("x", matrix)
