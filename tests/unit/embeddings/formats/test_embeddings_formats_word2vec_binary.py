"""Binary word2vec: bytes written by hand, gensim's own file, and files that are cut off or damaged."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.embeddings.formats import Fault, word2vec_binary
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.errors import EmbeddingError
from vector_files import RECORDED, expected, opened, read_all, written

WORDS = [b"the", "caf\u00e9".encode(), b"x", "\U0001f600".encode()]
MATRIX = np.array([[1.5, -2], [0.25, 1e-30], [0, 0], [3, 4]], np.float32)
SMALL = b"4 2\n" + b"".join(
    word + b" " + struct.pack("<2f", *row) + b"\n" for word, row in zip(WORDS, MATRIX, strict=True)
)


def made(words, matrix, newline=b"\n", num_words=None) -> bytes:
    num_words = len(words) if num_words is None else num_words
    records = [word + b" " + row.astype("<f4").tobytes() + newline for word, row in zip(words, matrix, strict=True)]
    return b"%d %d\n" % (num_words, matrix.shape[1]) + b"".join(records)


@pytest.mark.parametrize("packing", ["", "gzip", "zip"])
@pytest.mark.parametrize("newline", [b"", b"\n", b"\n\n"])
def test_words_and_numbers_are_those_that_were_written(tmp_path: Path, newline: bytes, packing: str):
    vectors = opened(word2vec_binary, written(tmp_path / "a.bin", made(WORDS, MATRIX, newline), packing))
    assert (vectors.dimension, vectors.num_promised, vectors.first_number) == (2, 4, 1)
    read = read_all(vectors)
    assert read.words == WORDS
    assert read.matrix.tobytes() == MATRIX.tobytes()
    assert not read.faults
    read = read_all(vectors, [b"x", b"nowhere"])
    assert read.words == [b"x"]
    assert read.num_words == 4
    assert (read.matrix == MATRIX[2]).all()
    assert vectors.build(WORDS) is None


def test_the_small_file_by_hand(tmp_path: Path):
    assert SMALL[:16] == b"4 2\nthe \x00\x00\xc0\x3f\x00\x00\x00\xc0"
    assert read_all(opened(word2vec_binary, written(tmp_path / "a", SMALL))).words == WORDS


def test_a_file_of_gensim(tmp_path: Path):
    read = read_all(opened(word2vec_binary, RECORDED / "vectors.bin"))
    words, matrix = expected("vectors.bin")
    assert read.words == words
    assert read.matrix.tobytes() == matrix.tobytes()


@pytest.mark.parametrize("packing", ["", "gzip"])
def test_a_file_that_is_cut_anywhere_keeps_its_whole_words(tmp_path: Path, packing: str):
    header_bytes = SMALL.index(b"\n") + 1
    ends = np.cumsum([header_bytes, *(len(word) + 10 for word in WORDS)]) - 1  # the last newline does not count
    for num_bytes in range(header_bytes + 8, len(SMALL) - 1):
        path = written(tmp_path / "cut.bin", SMALL[:num_bytes], packing)
        read = read_all(opened(word2vec_binary, path))
        num_whole = int((ends[1:] <= num_bytes).sum())
        assert read.words == WORDS[:num_whole]
        assert read.matrix.tobytes() == MATRIX[:num_whole].tobytes()
        assert read.faults == [Fault("truncated", 0, f"{num_whole} of 4 words")]
        assert read.num_words == num_whole


def test_a_gzip_file_that_is_cut_off_says_so(tmp_path: Path):
    matrix = np.random.default_rng(0).normal(size=(3000, 30)).astype(np.float32)
    words = [b"w%d" % number for number in range(3000)]
    path = written(tmp_path / "a.bin", made(words, matrix), "gzip")
    path.write_bytes(path.read_bytes()[:-50_000])
    read = read_all(opened(word2vec_binary, path))
    assert 2000 < len(read.words) < 3000
    assert read.words == words[: len(read.words)]
    assert read.matrix.tobytes() == matrix[: len(read.words)].tobytes()
    assert read.faults == [Fault("truncated", 0, f"{len(read.words)} of 3000 words")]


@given(st.integers(1, 5), st.lists(st.binary(max_size=6).map(lambda word: word.replace(b" ", b"_")), max_size=9))
def test_any_words_are_read_back(dimension: int, words: list[bytes]):
    import tempfile

    matrix = np.arange(len(words) * dimension, dtype=np.float32).reshape(-1, dimension) * 1.1
    words = [word.strip(b"\n") for word in words]
    with tempfile.TemporaryDirectory() as folder:
        source = Source(written(Path(folder, "a"), made(words, matrix.reshape(len(words), dimension))))
        read = read_all(word2vec_binary.open_vectors(source))
    is_text = [_is_utf8(word) for word in words]
    assert read.words == [word for word, good in zip(words, is_text, strict=True) if good]
    assert (read.matrix == matrix[np.array(is_text, bool)]).all()
    assert read.num_words == len(words)
    assert [fault.at for fault in read.faults] == [place for place, good in enumerate(is_text) if not good]


def _is_utf8(word: bytes) -> bool:
    try:
        word.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("dimension", [1, 1000])
def test_many_parts(tmp_path: Path, dimension: int):
    num_words = 3_000_000 // (4 * dimension)
    matrix = np.random.default_rng(1).random((num_words, dimension), np.float32)
    words = [b"word%d" % number for number in range(num_words)]
    vectors = opened(word2vec_binary, written(tmp_path / "a", made(words, matrix)))
    assert len(list(vectors.parts(None))) > 2
    read = read_all(vectors)
    assert read.words == words
    assert read.matrix.tobytes() == matrix.tobytes()
    chosen = words[:: num_words // 7]
    read = read_all(vectors, dict.fromkeys(chosen))
    assert read.words == chosen
    assert (read.matrix == matrix[:: num_words // 7]).all()


def test_faults_are_told(tmp_path: Path):
    matrix = np.array([[1, 2], [np.nan, 1], [1, -np.inf], [5, 6]], np.float32)
    vectors = opened(word2vec_binary, written(tmp_path / "a", made([b"a", b"b", b"c", b"caf\xe9"], matrix)))
    read = read_all(vectors)
    assert read.words == [b"a", b"b", b"c"]
    assert read.num_words == 4
    assert read.faults == [
        Fault("utf-8", 3, r"b'caf\xe9'"),
        Fault("finite", 1, "number 1 of 2 is nan"),
        Fault("finite", 2, "number 2 of 2 is -inf"),
    ]
    assert [fault.kind for fault in read_all(vectors, {b"a"}).faults] == ["utf-8"]


def test_what_stands_behind_the_promised_words_is_not_read(tmp_path: Path):
    vectors = opened(word2vec_binary, written(tmp_path / "a", made(WORDS, MATRIX, num_words=3) + b"more"))
    read = read_all(vectors)
    assert read.words == WORDS[:3]
    assert not read.faults


def test_what_is_no_word_is_not_read_to_its_end(tmp_path: Path):
    raw = made(WORDS, MATRIX, num_words=9) + bytes(5 << 20)
    read = read_all(opened(word2vec_binary, written(tmp_path / "a", raw)))
    assert read.words == WORDS
    assert read.faults == [Fault("truncated", 0, "4 of 9 words")]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"4 2\n",
        b"4 2\nthe 1.5 -2\nx 0 0\n",
        b"1 1\na 0.25",
        b"2 1\na 0.12\nb 0.13\n",
        b"2 3\ncaf\xe9 1 2 3\nb 1 2 3\n",
        b"3 4\nsome text that is no vector at all\nand more of it\n",
        "3 4\nIrgendein Text über Möwen\n".encode(),
        SMALL.replace(b"4 2", b"4 0"),
        SMALL.replace(b"4 2", b"0 2"),
        SMALL.replace(b"4 2", b"4 -2"),
        SMALL.replace(b"4 2", b"4"),
        SMALL.replace(b"4 2", b"4 2 1"),
        SMALL[4:],
        b"4 2\n" + bytes(5000),
        b"1 300\n" + b"x" * 5000,
    ],
)
def test_what_is_not_recognised(tmp_path: Path, raw: bytes):
    source = Source(written(tmp_path / "a", raw))
    assert not word2vec_binary.recognises(source.head, source)


def test_text_whose_last_letter_goes_on_behind_the_head_is_text(tmp_path: Path):
    raw = (b"9 4\n" + "é".encode() * (40 << 10)).replace("é".encode() * 9, "é é é é\n".encode())
    source = Source(written(tmp_path / "a", raw))
    assert not word2vec_binary.recognises(source.head, source)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"hello\n", "begins with b'hello', not with the numbers of words .*: download it again"),
        (b"4 0\nx", "has a header with dimension 0, which must be 1 to 1048576: download it again"),
        (b"4 999999999999\nx", "has a header with dimension 999999999999"),
        (b"4 -3\nx", r"begins with b'4 -3', not with"),
    ],
)
def test_a_wrong_header_is_an_error(tmp_path: Path, raw: bytes, why: str):
    with pytest.raises(EmbeddingError, match=why):
        word2vec_binary.open_vectors(Source(written(tmp_path / "a", raw)))
