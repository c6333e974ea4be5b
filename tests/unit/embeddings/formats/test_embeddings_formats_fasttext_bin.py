"""fastText models: recorded files and vectors, models packed by hand, and damage of every kind."""

import gc
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.formats import Fault, fasttext_bin
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.errors import EmbeddingError
from vector_files import RECORDED, expected, expected_unknown, opened, read_all, written

MODELS = ["subwords.bin", "words.bin", "labels.bin"]


def made(words, matrix, *, labels=(), minn=0, maxn=0, bucket=0, version=12, kind=2, pruned=-1, **changed) -> bytes:
    """Pack a model as ``FastText::saveModel`` does, field by field."""
    dimension = changed.get("dimension", matrix.shape[1])
    num_words, num_labels = changed.get("num_words", len(words)), len(labels)
    header = struct.pack("<2i", changed.get("magic", 793712314), version)
    arguments = struct.pack("<12id", dimension, 5, 1, 1, 5, 1, 2, kind, bucket, minn, maxn, 100, 1e-4)
    counts = struct.pack("<3i2q", num_words + num_labels, num_words, num_labels, 99, pruned)
    entries = [word + b"\0" + struct.pack("<qb", 7, 0) for word in words]
    entries += [label + b"\0" + struct.pack("<qb", 7, 1) for label in labels]
    sizes = struct.pack("<?2q", changed.get("quantized", False), *changed.get("shape", matrix.shape))
    return header + arguments + counts + b"".join(entries) + sizes + matrix.astype("<f4").tobytes() + b"\0output"


@pytest.mark.parametrize("packing", ["", "gzip", "zip"])
@pytest.mark.parametrize("name", MODELS)
def test_words_have_the_bits_that_fasttext_gives_them(name: str, packing: str, tmp_path: Path):
    vectors = opened(fasttext_bin, written(tmp_path / name, (RECORDED / name).read_bytes(), packing))
    words, matrix = expected(name)
    read = read_all(vectors)
    assert read.words == words
    assert read.matrix.tobytes() == matrix.tobytes()
    assert not read.faults
    assert vectors.num_promised == len(words)
    read = read_all(vectors, {words[-1]})
    assert read.words == words[-1:]
    assert read.matrix.tobytes() == matrix[-1:].tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_unknown_words_have_the_bits_that_fasttext_gives_them(name: str):
    vectors = opened(fasttext_bin, RECORDED / name)
    words, matrix = expected_unknown(name)
    known = read_all(vectors).words
    has, rows = vectors.build([word for word in words if word not in known])
    asked = [place for place, word in enumerate(words) if word not in known]
    assert len(asked) >= 5
    assert rows.tobytes() == matrix[asked].tobytes()
    assert has.tolist() == [bool(row.any()) for row in matrix[asked]]
    assert has.any() == (name != "words.bin")
    nothing, empty = vectors.build([])
    assert nothing.shape == (0,)
    assert empty.shape == (0, vectors.dimension)


def test_no_words(tmp_path: Path):
    vectors = opened(fasttext_bin, written(tmp_path / "a", made([], np.zeros((0, 3)))))
    assert read_all(vectors).words == []
    assert vectors.num_promised == 0
    assert vectors.build([b"x"])[0].tolist() == [False]


def test_labels_are_no_words(tmp_path: Path):
    matrix = np.array([[1, 2], [3, 4]])
    path = written(tmp_path / "a", made([b"a", b"b"], matrix, labels=[b"__label__x"] * 3, kind=3))
    read = read_all(opened(fasttext_bin, path))
    assert read.words == [b"a", b"b"]
    assert (read.matrix == matrix).all()
    assert read.num_words == 2


def test_a_supervised_model_of_version_11_has_no_ngrams(tmp_path: Path):
    matrix = np.arange(8).reshape(4, 2)
    for version, kind in ((11, 3), (12, 3), (11, 2)):
        raw = made([b"a"], matrix, minn=3, maxn=3, bucket=1, version=version, kind=kind)
        (row,) = read_all(opened(fasttext_bin, written(tmp_path / "a", raw))).matrix.tolist()
        # "<a>" is one n-gram, in the only bucket, whose row is [2, 3]
        assert row == ([0, 1] if (version, kind) == (11, 3) else [1, 2])


def test_many_words_in_many_parts(tmp_path: Path):
    words = [b"word%d" % number for number in range(150_000)]
    matrix = np.arange(len(words))[:, None]
    vectors = opened(fasttext_bin, written(tmp_path / "a", made(words, matrix)))
    assert len(list(vectors.parts(None))) > 2
    read = read_all(vectors)
    assert read.words == words
    assert (read.matrix == matrix).all()
    read = read_all(vectors, words[5::50_000])
    assert read.words == words[5::50_000]
    assert (read.matrix == matrix[5::50_000]).all()


def test_faults_are_told(tmp_path: Path):
    matrix = np.array([[1, 2], [3, 4], [np.inf, 1]])
    read = read_all(opened(fasttext_bin, written(tmp_path / "a", made([b"\xff", b"a", b"b"], matrix))))
    assert read.words == [b"a", b"b"]
    assert read.faults == [Fault("utf-8", 0, r"b'\xff'"), Fault("finite", 1, "number 1 of 2 is inf")]


def test_sums_that_are_too_large_are_faults_and_are_not_built(tmp_path: Path):
    matrix = np.array([[3e38, 1], [3e38, 2]])
    vectors = opened(fasttext_bin, written(tmp_path / "a", made([b"a"], matrix, minn=3, maxn=3, bucket=1)))
    assert read_all(vectors).faults == [Fault("finite", 0, "number 1 of 2 is inf")]
    has, _ = vectors.build([b"a", b"aa"])
    assert has.tolist() == [True, False]


def test_a_file_that_is_cut_anywhere_is_an_error_that_says_so(tmp_path: Path):
    raw = made([b"one", b"two"], np.ones((5, 2)), minn=2, maxn=3, bucket=3)
    for num_bytes in range(4, len(raw) - len(b"\0output")):
        path = written(tmp_path / "a", raw[:num_bytes])
        with pytest.raises(EmbeddingError, match="is cut off.*[:;] download it again"):
            opened(fasttext_bin, path)
    for num_bytes in range(len(raw) - len(b"\0output"), len(raw)):  # only the output matrix is missing
        read = read_all(opened(fasttext_bin, written(tmp_path / "a", raw[:num_bytes])))
        assert read.matrix.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 13}, "of version 13, but only versions 11 and 12 can be read"),
        ({"dimension": 0}, r"a damaged header \(dimension 0,"),
        ({"dimension": -3}, "a damaged header"),
        ({"num_words": -1}, "a damaged header"),
        ({"maxn": 1 << 30}, "n-grams of 0 to 1073741824 letters"),
        ({"bucket": -1}, "in -1 buckets"),
        (
            {"pruned": 3},
            r"is a quantized fastText model \(its dictionary was pruned to 3 n-grams\).*: use the original .bin",
        ),
        ({"quantized": True}, r"is a quantized fastText model \(its matrix is compressed\).*print-word-vectors"),
        ({"shape": (1, 2)}, "its matrix is 1 x 2, and 2 words and 0 buckets of dimension 2 need another shape"),
        ({"shape": (2, 3)}, "its matrix is 2 x 3"),
        ({"shape": (-2, -2)}, "its matrix is -2 x -2"),
        ({"shape": (1 << 40, 2)}, "is cut off: it has 23 of 8796093022208 bytes of its matrix"),
        ({"num_words": 1 << 30}, r"in its dictionary, after \d of 1073741824 words"),
        ({"minn": 1, "maxn": 2, "bucket": 9}, "2 words and 9 buckets of dimension 2 need another shape"),
    ],
)
def test_damage_and_quantized_models_are_errors(tmp_path: Path, changed: dict, why: str):
    with pytest.raises(EmbeddingError, match=why):
        opened(fasttext_bin, written(tmp_path / "a", made([b"a", b"b"], np.ones((2, 2)), **changed)))


def test_a_word_without_an_end_is_an_error(tmp_path: Path):
    raw = made([b"a", b"b" * 3_000_000], np.ones((2, 2)))
    with pytest.raises(EmbeddingError, match="is damaged in its dictionary, after 1 of 2 words"):
        opened(fasttext_bin, written(tmp_path / "a", raw))


def test_only_its_own_number_is_recognised(tmp_path: Path):
    for raw in (b"", b"4 2\nthe", made([b"a"], np.ones((1, 1)), magic=5)):
        source = Source(written(tmp_path / "a", raw))
        assert not fasttext_bin.recognises(source.head, source)


def test_the_temporary_file_goes_with_the_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "a.bin", (RECORDED / "subwords.bin").read_bytes(), "gzip")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    vectors = opened(fasttext_bin, path)
    assert len(list(folder.iterdir())) == 1
    assert read_all(vectors).words
    del vectors
    gc.collect()
    assert not list(folder.iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EmbeddingError, match="is cut off or damaged after .*: download it again"):
        opened(fasttext_bin, path)
    assert not list(folder.iterdir())
