"""Arrays with a file of words next to them: every way to name the words, and refusal of other arrays."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.formats import Fault, npy
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.errors import EmbeddingError
from vector_files import opened, read_all, written

WORDS = ["the", "café", "two words", "😀"]
MATRIX = np.array([[1.5, -2, 0], [0.25, 3, 1], [0, 0, 0], [4, 5, 6]])


def made(folder: Path, matrix=MATRIX, words: bytes | None = "\n".join(WORDS).encode(), name: str = "x.txt") -> Path:
    np.save(folder / "x.npy", matrix)
    if words is not None:
        (folder / name).write_bytes(words)
    return folder / "x.npy"


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8"])
def test_rows_of_every_type_and_order(tmp_path: Path, dtype: str, order: str):
    vectors = opened(npy, made(tmp_path, np.array(MATRIX, dtype, order=order)))
    assert (vectors.dimension, vectors.num_promised, vectors.first_number) == (3, 4, 1)
    read = read_all(vectors)
    assert read.words == [word.encode() for word in WORDS]
    assert (read.matrix == MATRIX).all()
    assert not read.faults
    read = read_all(vectors, [b"two words", b"nowhere"])
    assert read.words == [b"two words"]
    assert read.num_words == 4
    assert (read.matrix == MATRIX[2]).all()
    assert vectors.build([b"x"]) is None


LINES = "\n".join(WORDS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.txt", LINES + "\n"),
        ("x.words", LINES.replace("\n", "\r\n")),
        ("x.vocab", LINES),
        ("x.json", json.dumps(WORDS)),
        ("x.json", json.dumps({word: row for row, word in reversed(list(enumerate(WORDS)))})),
        ("words.txt", LINES),
        ("vocab.txt", LINES),
        ("vocabulary.txt", LINES),
        ("vocab.json", json.dumps(WORDS, ensure_ascii=False)),
    ],
)
def test_words_are_found_beside_it(tmp_path: Path, name: str, words: str):
    read = read_all(opened(npy, made(tmp_path, words=words.encode(), name=name)))
    assert read.words == [word.encode() for word in WORDS]


def test_its_own_words_go_before_those_of_the_folder(tmp_path: Path):
    (tmp_path / "words.txt").write_text("a\nb\nc\nd\n")
    assert read_all(opened(npy, made(tmp_path))).words[0] == b"the"


def test_many_words_in_many_parts(tmp_path: Path):
    words = [b"word-number-%d" % number for number in range(200_000)]
    vectors = opened(npy, made(tmp_path, np.arange(200_000.0)[:, None], b"\n".join(words)))
    assert len(list(vectors.parts(None))) > 2
    read = read_all(vectors)
    assert read.words == words
    assert (read.matrix[:, 0] == np.arange(200_000)).all()
    assert read_all(vectors, set(words[7::50_000])).matrix[:, 0].tolist() == [7, 50_007, 100_007, 150_007]


def test_faults_are_told(tmp_path: Path):
    matrix = np.array([[1, 2], [1e300, 1], [3, np.nan]])
    read = read_all(opened(npy, made(tmp_path, matrix, b"\xff\na\nb\n")))
    assert read.words == [b"a", b"b"]
    assert read.faults == [
        Fault("utf-8", 0, r"b'\xff'"),
        Fault("finite", 0, "number 1 of 2 is inf"),
        Fault("finite", 1, "number 2 of 2 is nan"),
    ]


def test_no_words_at_all(tmp_path: Path):
    assert read_all(opened(npy, made(tmp_path, np.empty((0, 5)), b""))).words == []


@pytest.mark.parametrize(
    ("words", "name", "why"),
    [
        (
            None,
            "x.txt",
            r"x.npy has no words: write them, one per line .* into x.txt next to it \(tried: x.txt, x.wo",
        ),
        (b"a\nb\nc\n", "x.txt", "x.txt has 3 words, but .*x.npy has 4 rows: give the words"),
        (b"a\nb\nc\nd\ne", "words.txt", "words.txt has 5 words, but"),
        (b"a\nb\nc\nd\n\n", "x.txt", "has 5 words"),
        (b'["a", "b"]', "x.json", "x.json has 2 words"),
        (b'["a", "b"', "x.json", r"x.json is not JSON \(.*\): write a list"),
        (b"[" * 100_000, "x.json", "x.json is not JSON"),
        (b'"abcd"', "x.json", "holds neither a list of words nor .* but a str: write one of these"),
        (b'["a", 1, "b", "c"]', "x.json", "holds neither a list of words"),
        (b'{"a": 0, "b": 4}', "x.json", "has row 4 for 'b', but rows must be 0 to 3, each once: correct it"),
        (b'{"a": 0, "b": 0}', "x.json", "has row 0 for 'b'"),
        (b'{"a": 0, "b": "1"}', "x.json", "has row '1' for 'b'"),
        (b'{"a": 0, "b": true}', "x.json", "has row True for 'b'"),
        (b'{"a": 0, "b": -1}', "x.json", "has row -1 for 'b'"),
        (
            b"x" * 2_000_000,
            "x.txt",
            "has a line longer than 65536 bytes, which is too long for a word: write one word per line",
        ),
    ],
)
def test_words_that_do_not_fit_are_errors(tmp_path: Path, words: bytes | None, name: str, why: str):
    with pytest.raises(EmbeddingError, match=why):
        opened(npy, made(tmp_path, words=words, name=name))


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        (np.zeros(4), r"has the shape \(4,\), but word vectors need \(words, dimension\): save it again"),
        (np.zeros((4, 2, 2)), r"the shape \(4, 2, 2\)"),
        (np.zeros((4, 0)), r"the shape \(4, 0\)"),
        (np.float32(1), r"the shape \(\)"),
        (
            np.zeros((4, 2), int),
            "holds int64, but vectors must be float16, float32 or float64: convert it with array.astype",
        ),
        (np.zeros((4, 2), complex), "holds complex128"),
        (np.zeros((4, 2), "S3"), r"holds \|S3"),
    ],
)
def test_arrays_that_are_no_vectors_are_errors(tmp_path: Path, matrix: np.ndarray, why: str):
    with pytest.raises(EmbeddingError, match=why):
        opened(npy, made(tmp_path, matrix))


class Hostile:
    """A value that makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_objects_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EmbeddingError, match=r"cannot map .* as an array \(.*\): it may .* hold objects"):
        opened(npy, made(tmp_path, np.array([[Hostile()]], object)))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_cut_anywhere_is_an_error(tmp_path: Path):
    path = made(tmp_path)
    raw = path.read_bytes()
    for num_bytes in range(6, len(raw)):
        path.write_bytes(raw[:num_bytes])
        with pytest.raises(EmbeddingError, match=r"cannot map .* as an array .*save it again"):
            opened(npy, path)


@pytest.mark.parametrize("packing", ["gzip", "zip"])
def test_a_compressed_file_has_no_words_beside_it(tmp_path: Path, packing: str):
    raw = made(tmp_path).read_bytes()
    with pytest.raises(
        EmbeddingError, match=f"is a .npy file in a {packing} file, which cannot be mapped.*: move it, unpacked"
    ):
        opened(npy, written(tmp_path / "y.npy", raw, packing))


def test_a_folder_of_that_name_is_no_words_file(tmp_path: Path):
    path = made(tmp_path, name="x.words")
    (tmp_path / "x.txt").mkdir()
    assert read_all(opened(npy, path)).num_words == 4


def test_only_its_own_magic_is_recognised(tmp_path: Path):
    for raw in (b"", b"NUMPY", b"4 2\nthe"):
        source = Source(written(tmp_path / "a", raw))
        assert not npy.recognises(source.head, source)
