"""gensim's files: recorded files with gensim's vectors, older files as they were pickled then, and hostile files."""

import os
import pickle
import shutil
import sys
import types
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.formats import Fault, gensim
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.errors import EmbeddingError
from vector_files import RECORDED, expected, expected_unknown, opened, read_all, written

FILES = ["inside.kv", "beside.kv", "word2vec.model", "fasttext.kv"]
MATRIX = np.array([[1.5, -2], [0.25, 3], [0, 0]], np.float32)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes classes with the module and name of gensim's classes, for pickling."""

    def make(module: str, name: str) -> type:
        made = type(name, (), {"__module__": module})
        for number in range(1, module.count(".") + 2):
            part = ".".join(module.split(".")[:number])
            monkeypatch.setitem(sys.modules, part, sys.modules.get(part, types.ModuleType(part)))
        setattr(sys.modules[module], name, made)
        return made

    return make


def filled(made: type, **attributes):
    thing = made()
    thing.__dict__.update(attributes)
    return thing


def saved(folder: Path, thing, protocol: int = 4, packing: str = "") -> Path:
    return written(folder / "a.kv", pickle.dumps(thing, protocol), packing)


@pytest.mark.parametrize("name", FILES)
def test_words_have_the_bits_that_gensim_gives_them(name: str):
    vectors = opened(gensim, RECORDED / name)
    words, matrix = expected(name)
    assert (vectors.dimension, vectors.num_promised, vectors.first_number) == (3, len(words), 1)
    read = read_all(vectors)
    assert read.words == words
    assert read.matrix.tobytes() == matrix.tobytes()
    assert not read.faults
    read = read_all(vectors, {words[2]})
    assert read.words == words[2:3]
    assert read.num_words == len(words)
    assert (read.matrix == matrix[2]).all()


def test_unknown_words_have_the_bits_that_gensim_gives_them():
    vectors = opened(gensim, RECORDED / "fasttext.kv")
    known, (words, matrix) = read_all(vectors).words, expected_unknown("fasttext.kv")
    asked = [place for place, word in enumerate(words) if word not in known]
    has, rows = vectors.build([words[place] for place in asked])
    assert len(asked) == 5
    assert has.all()
    assert rows.tobytes() == matrix[asked].tobytes()
    assert opened(gensim, RECORDED / "inside.kv").build([b"x"]) is None


@pytest.mark.parametrize("packing", ["gzip", "zip"])
def test_a_compressed_file(tmp_path: Path, packing: str):
    vectors = opened(gensim, written(tmp_path / "a", (RECORDED / "inside.kv").read_bytes(), packing))
    assert read_all(vectors).words == expected("inside.kv")[0]
    with pytest.raises(EmbeddingError, match="the vectors of .* are in a separate file, which .*: move all its files"):
        opened(gensim, written(tmp_path / "a", (RECORDED / "beside.kv").read_bytes(), packing))


def test_arrays_beside_it_must_be_there_and_whole(tmp_path: Path):
    path = Path(shutil.copy(RECORDED / "beside.kv", tmp_path))
    with pytest.raises(
        EmbeddingError, match=r"must be in the missing file beside.kv.vectors.npy in the same folder: c"
    ):
        opened(gensim, path)
    beside = Path(shutil.copy(RECORDED / "beside.kv.vectors.npy", tmp_path))
    assert read_all(opened(gensim, path)).num_words == 4
    beside.write_bytes(beside.read_bytes()[:-1])
    with pytest.raises(EmbeddingError, match="cannot map .*beside.kv.vectors.npy as an array"):
        opened(gensim, path)
    np.save(beside, np.zeros((3, 3), np.float32))
    with pytest.raises(EmbeddingError, match="has 4 words but 3 vectors: use the files that were saved together"):
        opened(gensim, path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2"])
def test_files_of_gensim_3(tmp_path: Path, classes, dtype: str, order: str, protocol: int):
    vocab = classes("gensim.models.keyedvectors", "Vocab")
    vectors = filled(
        classes("gensim.models.keyedvectors", "Word2VecKeyedVectors"),
        vectors=np.array(MATRIX, dtype, order=order),
        vocab={word: filled(vocab, count=9, index=row) for row, word in enumerate(["the", "café", "猫"])},
        vector_size=2,
        index2word=["the", "café", "猫"],
    )
    model = filled(classes("gensim.models.word2vec", "Word2Vec"), wv=vectors, vocabulary=None, epochs=5)
    for thing in (vectors, model):
        read = read_all(opened(gensim, saved(tmp_path, thing, protocol)))
        assert read.words == [b"the", "café".encode(), "猫".encode()]
        assert (read.matrix == MATRIX).all()


def test_files_of_gensim_0(tmp_path: Path, classes):
    model = filled(classes("gensim.models.word2vec", "Word2Vec"), syn0=MATRIX, index2word=["a", "b", "c"], vocab={})
    assert read_all(opened(gensim, saved(tmp_path, model, 2))).words == [b"a", b"b", b"c"]
    model = filled(type(model), index2word=["a", "b", "c"], __numpys=["syn0"])
    np.save(tmp_path / "a.kv.syn0.npy", MATRIX)
    assert (read_all(opened(gensim, saved(tmp_path, model, 2))).matrix == MATRIX).all()


def test_arrays_of_a_model_are_beside_it_under_the_name_of_its_part(tmp_path: Path, classes):
    vectors = filled(
        classes("gensim.models.keyedvectors", "KeyedVectors"), index_to_key=["a", "b"], __numpys=["vectors"]
    )
    model = filled(classes("gensim.models.word2vec", "Word2Vec"), wv=vectors)
    np.save(tmp_path / "a.kv.wv.vectors.npy", MATRIX)
    read = read_all(opened(gensim, saved(tmp_path, model)))
    assert read.words == [b"a", b"b"]
    assert (read.matrix == MATRIX[:2]).all()


def subword_model(classes, **changed):
    attributes = {
        "index_to_key": ["a", "b"], "vectors_vocab": MATRIX[:2], "vectors_ngrams": MATRIX, "bucket": 3, "min_n": 1,
        "max_n": 2, "compatible_hash": True,
    }  # fmt: skip
    return filled(classes("gensim.models.fasttext", "FastTextKeyedVectors"), **(attributes | changed))


def test_ngrams_of_another_kind_are_not_used(tmp_path: Path, classes):
    assert opened(gensim, saved(tmp_path, subword_model(classes))).build([b"x"]) is not None
    others = (
        {"compatible_hash": False}, {"hash2index": {1: 2}}, {"bucket": 4}, {"max_n": 1 << 40}, {"min_n": 3},
    )  # fmt: skip
    for changed in others:
        vectors = opened(gensim, saved(tmp_path, subword_model(classes, vectors=MATRIX, **changed)))
        assert vectors.build([b"x"]) is None
        assert (read_all(vectors).matrix == MATRIX[:2]).all()
        with pytest.raises(EmbeddingError, match="has 2 words, but their vectors are missing .*save_word2vec_format"):
            opened(gensim, saved(tmp_path, subword_model(classes, **changed)))
    vectors = opened(gensim, saved(tmp_path, subword_model(classes, bucket=0)))
    assert (read_all(vectors).matrix == MATRIX[:2]).all()


def test_faults_are_told(tmp_path: Path, classes):
    made = classes("gensim.models.keyedvectors", "KeyedVectors")
    matrix = MATRIX.copy()
    matrix[1, 0] = np.nan
    read = read_all(opened(gensim, saved(tmp_path, filled(made, vectors=matrix, index_to_key=["\ud800", "a", "b"]))))
    assert read.words == [b"a", b"b"]
    assert read.faults == [Fault("utf-8", 0, r"b'\xed\xa0\x80'"), Fault("finite", 0, "number 1 of 2 is nan")]
    assert read_all(opened(gensim, saved(tmp_path, filled(made, vectors=MATRIX, index_to_key=[])))).words == []


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({}, r"holds gensim.models.keyedvectors.KeyedVectors, which has no list of words: save the KeyedVectors"),
        ({"index_to_key": ["a", 1], "vectors": MATRIX}, "has keys that are not words"),
        ({"index_to_key": "abc", "vectors": MATRIX}, "has keys that are not words"),
        ({"index_to_key": ["a"]}, "has 1 words, but their vectors are missing"),
        ({"index_to_key": ["a"], "vectors": 3}, "has 1 words, but their vectors are missing"),
        (
            {"index_to_key": ["a"], "vectors": Path("x")},
            "the vectors in .* are not a floating-point array .*not saved by numpy",
        ),
        (
            {"index_to_key": ["a"], "vectors": np.array([["x", 1]], object)},
            r"not a floating-point array \(its type is b'O8'\)",
        ),
        ({"index_to_key": ["a"], "vectors": np.array([[1]])}, "its type is b'i8'"),
        ({"index_to_key": ["a"], "vectors": np.ones(3)}, r"has the shape \(3,\)"),
        ({"index_to_key": ["a", "b"], "vectors": np.ones((1, 2))}, "has 2 words but 1 vectors: use the files"),
    ],
)
def test_objects_without_words_or_vectors_are_errors(tmp_path: Path, classes, attributes: dict, why: str):
    thing = filled(classes("gensim.models.keyedvectors", "KeyedVectors"), **attributes)
    with pytest.raises(EmbeddingError, match=why):
        opened(gensim, saved(tmp_path, thing))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_anywhere_is_an_error(tmp_path: Path, name: str):
    raw = (RECORDED / name).read_bytes()
    for num_bytes in range(60, len(raw), 1 if len(raw) < 2000 else 13):
        path = written(tmp_path / name, raw[:num_bytes])
        with pytest.raises(EmbeddingError, match="is not a complete pickle .*: download it again"):
            opened(gensim, path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["inside.kv", "fasttext.kv"])
def test_a_file_with_a_wrong_byte_is_read_or_an_error(tmp_path: Path, name: str):
    raw = bytearray((RECORDED / name).read_bytes())
    for place in range(60, len(raw)):
        changed = raw.copy()
        changed[place] ^= 0xFF
        with suppress(EmbeddingError):
            read_all(gensim.open_vectors(Source(written(tmp_path / name, bytes(changed)))))


class Hostile:
    """A value that calls a function when it is unpickled."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_nothing_that_a_file_names_is_run(tmp_path: Path, classes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made = classes("gensim.models.keyedvectors", "KeyedVectors")
    calls = [
        Hostile(os.system, "mkdir ran"),
        Hostile(os.mkdir, "ran"),
        Hostile(eval, "__import__('os').mkdir('ran')"),
        Hostile(getattr, Hostile(__import__, "os"), "system"),
    ]
    for call in calls:
        for attributes in ({"wv": call}, {"vectors": call, "index_to_key": ["a"]}, {"index_to_key": [call]}):
            with pytest.raises(EmbeddingError):
                opened(gensim, saved(tmp_path, filled(made, **attributes)))
        thing = filled(made, vectors=MATRIX, index_to_key=["a", "b", "c"], lifecycle_events=[call])
        assert read_all(opened(gensim, saved(tmp_path, thing))).num_words == 3
    assert not (tmp_path / "ran").exists()


def test_what_is_not_recognised(tmp_path: Path):
    for raw in (
        b"",
        b"\x80\x04",
        pickle.dumps({"a": [1.0]}, 4),
        b"\x80\x06gensim.models",
        b"gensim.models",
        b"4 2\nthe",
    ):
        source = Source(written(tmp_path / "a", raw))
        assert not gensim.recognises(source.head, source)
