"""A table in one file: filled in place, mapped, readable by safetensors, and refused if it is damaged."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.embeddings.table import TableWriter, create_table, is_table, open_table
from plimsoll.embeddings.wanted import EXACT
from plimsoll.errors import EmbeddingError
from processes import environment

WORDS = ["the", None, "été", "", "a b"]


def written(path: Path, precision="float32") -> Path:
    table = create_table(path, WORDS, 3, precision)
    table.vectors[:] = np.arange(15).reshape(5, 3) / 8
    return path


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_table_is_what_was_put_into_it(tmp_path: Path, precision: str):
    table = open_table(written(tmp_path / "x", precision))
    assert table.vectors.dtype == np.dtype(precision)
    assert table.vectors.tolist() == (np.arange(15).reshape(5, 3) / 8).tolist()
    assert table.texts() == WORDS
    assert table.raw_words() == [b"the", b"\xff", "été".encode(), b"", b"a b"]
    assert table.found.tolist() == [0] * 5
    assert table.path == tmp_path / "x"


def test_a_new_table_is_zeros(tmp_path: Path):
    assert create_table(tmp_path / "x", WORDS, 3, "float32").vectors.tolist() == [[0] * 3] * 5


@pytest.mark.parametrize("words", [[], [""], [None], ["", ""]])
def test_tables_of_next_to_nothing_can_be_opened(tmp_path: Path, words: list[str | None]):
    create_table(tmp_path / "x", words, 2, "float32")
    table = open_table(tmp_path / "x")
    assert table.texts() == words
    assert table.vectors.shape == (len(words), 2)


def test_safetensors_reads_it(tmp_path: Path):
    tensors = safetensors.numpy.load_file(written(tmp_path / "x"))
    assert sorted(tensors) == ["found", "vectors", "word_ends", "words"]
    assert tensors["vectors"].tolist() == (np.arange(15).reshape(5, 3) / 8).tolist()
    assert tensors["word_ends"].tolist() == [3, 4, 9, 9, 12]
    assert tensors["words"].tobytes() == b"the\xff" + "été".encode() + b"a b"


def test_a_table_opened_to_read_cannot_be_written_to(tmp_path: Path):
    table = open_table(written(tmp_path / "x"))
    with pytest.raises(ValueError, match="read-only"):
        table.vectors[0, 0] = 1


def test_a_copy_is_written_to_by_its_process_alone(tmp_path: Path):
    before = written(tmp_path / "x").read_bytes()
    copy, other = open_table(tmp_path / "x", "copy"), open_table(tmp_path / "x")
    copy.vectors[:] = 7
    assert other.vectors[0].tolist() == [0, 0.125, 0.25]
    assert (tmp_path / "x").read_bytes() == before


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_writer_that_does_not_know_how_many_words_there_will_be(tmp_path: Path, precision: str):
    with TableWriter(tmp_path / "x", 2, precision) as writer:
        writer.add([b"a", b"b c"], np.array([[1, 2], [3, 4]], np.float32))
        writer.add([], np.empty((0, 2), np.float32))
        writer.add([b"", b"\xff\xfe"], np.array([[5, 6], [7, 8]], np.float32))
    table = open_table(tmp_path / "x")
    assert table.vectors.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert table.vectors.dtype == np.dtype(precision)
    assert table.raw_words() == [b"a", b"b c", b"", b"\xff\xfe"]
    assert table.texts() == ["a", "b c", "", "\udcff\udcfe"]
    assert table.found.tolist() == [EXACT] * 4
    assert len(safetensors.numpy.load_file(tmp_path / "x")) == 4


@given(st.lists(st.one_of(st.none(), st.text(max_size=5), st.just("\ud800"))))
def test_words_of_any_kind_come_back(tmp_path_factory: pytest.TempPathFactory, words: list[str | None]):
    path = tmp_path_factory.mktemp("table") / "x"
    create_table(path, words, 1, "float16")
    assert open_table(path).texts() == words


def test_a_table_that_is_cut_anywhere_is_refused(tmp_path: Path):
    raw = written(tmp_path / "x").read_bytes()
    for kept in range(len(raw)):
        (tmp_path / "x").write_bytes(raw[:kept])
        with pytest.raises(EmbeddingError, match=r"has 0 bytes|has no safetensors header|is cut off: it has .* of"):
            open_table(tmp_path / "x")


def test_a_damaged_header_is_refused_or_does_not_matter(tmp_path: Path):
    raw = written(tmp_path / "x").read_bytes()
    num_refused = 0
    for place in range(raw.index(b"}}") + 2):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[place] ^= 1 << bit
            (tmp_path / "x").write_bytes(damaged)
            try:
                table = open_table(tmp_path / "x")
            except EmbeddingError:
                num_refused += 1
            else:
                assert [len(array) for array in (table.vectors, table.found, table.word_ends)] == [5, 5, 5]
                assert table.vectors.shape[1] in {1, 2, 3, 6, 7}
    assert num_refused > 8 * 300


@pytest.mark.parametrize("raw", [b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]", b"text", b"\xff" * 20])
def test_what_is_no_table_is_refused(tmp_path: Path, raw: bytes):
    (tmp_path / "x").write_bytes(raw)
    assert not is_table(raw)
    with pytest.raises(EmbeddingError, match=r"make it again|is not a table of word vectors"):
        open_table(tmp_path / "x")


def test_another_file_of_safetensors_is_no_table(tmp_path: Path):
    safetensors.numpy.save_file({"weight": np.ones((2, 2))}, tmp_path / "x")
    assert not is_table((tmp_path / "x").read_bytes())
    with pytest.raises(EmbeddingError, match="holds weight and is not a table of word vectors: give a table"):
        open_table(tmp_path / "x")
    assert is_table(written(tmp_path / "y").read_bytes()[:200])


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path):
    code = (
        "import resource, signal, sys; from pathlib import Path; from plimsoll.embeddings.table import create_table;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "create_table(Path(sys.argv[1]), ['a'] * 1000, 300, 'float32')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert "OSError: [Errno 27] File too large" in done.stderr
