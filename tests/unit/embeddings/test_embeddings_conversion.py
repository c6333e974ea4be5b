"""Conversion of vectors: the new file is complete or absent, and is read back bit for bit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.embeddings.conversion import check_output, convert, export
from plimsoll.embeddings.opening import open_file
from plimsoll.embeddings.subsets import take_subset
from plimsoll.embeddings.table import open_table
from plimsoll.errors import EmbeddingError, OutputError

SUFFIXES = [".safetensors", ".npy", ".txt", ".vec", ".bin"]
RAW = (
    b"the 0.1 -2.5e-3\nof 1e-45 3.4028235e38\nthe 9 9\n\xc3\xa9t\xc3\xa9 0.30000001192092896 -0.0\n"
    b"bad nan 1\nx 1\n\xff 1 2\n"
)
WORDS = [b"the", b"of", "été".encode()]
MATRIX = np.array([[0.1, -2.5e-3], [1e-45, 3.4028235e38], [0.30000001192092896, -0.0]], np.float32)


def read(path: Path) -> tuple[list[bytes], np.ndarray]:
    words, rows = [], []
    for part in open_file(path).vectors.parts(None):
        block = part()
        words += block.words
        rows.append(block.rows(np.arange(len(block.words))).matrix)
    return words, np.concatenate(rows)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.txt").write_bytes(RAW)
    return tmp_path / "in" / "x.txt"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_is_read_back_bit_for_bit(source: Path, tmp_path: Path, suffix: str):
    output = tmp_path / f"out{suffix}"
    done = convert(source, output)
    words, rows = read(output)
    assert words == WORDS
    assert rows.tobytes() == MATRIX.tobytes()
    assert (done.source, done.output, done.precision) == (str(source), str(output), "float32")
    assert (done.num_words, done.dimension, done.num_duplicates) == (3, 2, 1)
    assert done.num_bytes == output.stat().st_size
    assert [(fault.kind, fault.count) for fault in done.faults] == [
        ("NaN or infinite", 1),
        ("wrong dimension", 1),
        ("a word that is not UTF-8", 1),
    ]
    beside = {"out.txt"} if suffix == ".npy" else set()
    assert {path.name for path in tmp_path.iterdir()} == {"in", output.name} | beside


@pytest.mark.parametrize("first", SUFFIXES)
@pytest.mark.parametrize("second", SUFFIXES)
def test_from_any_format_to_any_other(source: Path, tmp_path: Path, first: str, second: str):
    (tmp_path / "1").mkdir()
    convert(source, tmp_path / "1" / f"a{first}")
    done = convert(tmp_path / "1" / f"a{first}", tmp_path / f"b{second}", strict=True)
    assert (done.num_words, done.num_duplicates, done.faults) == (3, 0, ())
    words, rows = read(tmp_path / f"b{second}")
    assert words == WORDS
    assert rows.tobytes() == MATRIX.tobytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_half_precision_is_that_of_numpy_and_what_is_too_large_is_a_fault(source: Path, tmp_path: Path, suffix: str):
    done = convert(source, tmp_path / f"out{suffix}", "float16")
    words, rows = read(tmp_path / f"out{suffix}")
    assert words == [WORDS[0], WORDS[2]]
    assert rows.astype(np.float16).tobytes() == MATRIX[[0, 2]].astype(np.float16).tobytes()
    assert done.faults[0].examples == (
        "line 2: 'of': number 2 of 2 is inf in float16",
        "line 5: 'bad': number 1 of 2 is nan",
    )


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.long
@given(st.lists(st.tuples(st.text(max_size=4).filter(lambda word: not set(word) & set(" \t\r\n\0")), numbers, numbers)))
def test_any_words_and_numbers_are_read_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, lines):
    folder = tmp_path_factory.mktemp("conversion")
    lines = [("good", 1.5, 2.5), *lines]
    (folder / "x").write_bytes("".join(f"{word} {a!r} {b!r}\n" for word, a, b in lines).encode())
    first = {word.encode(): np.array([a, b], np.float32).tobytes() for word, a, b in reversed(lines)}
    for suffix in SUFFIXES:
        convert(folder / "x", folder / f"out{suffix}")
        words, rows = read(folder / f"out{suffix}")
        assert dict(zip(words, [row.tobytes() for row in rows], strict=True)) == first


def test_a_word_with_spaces_is_written_where_it_can_be(tmp_path: Path):
    (tmp_path / "in").write_bytes(b"the 1 2\n. . . 3 4\n")
    for suffix in (".txt", ".npy", ".safetensors"):
        convert(tmp_path / "in", tmp_path / f"spaced{suffix}")
        assert read(tmp_path / f"spaced{suffix}")[0] == [b"the", b". . ."]
    for suffix in (".vec", ".bin"):
        with pytest.raises(
            EmbeddingError, match=r"the word '. . .' cannot be written in this format, .*: write .safetens"
        ):
            convert(tmp_path / "in", tmp_path / f"out{suffix}")
        assert not (tmp_path / f"out{suffix}").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_subset_keeps_all_rows_in_a_table_and_an_array_and_those_found_in_others(source: Path, tmp_path: Path):
    subset = take_subset(source, ["<pad>", "The", "absent", "été"], padding="<pad>", missing="mean")
    for suffix in SUFFIXES:
        (tmp_path / suffix[1:]).mkdir()
        export(subset.table, tmp_path / suffix[1:] / f"out{suffix}")
        words, rows = read(tmp_path / suffix[1:] / f"out{suffix}")
        if suffix == ".npy":
            assert words == [b"<pad>", b"The", b"absent", "été".encode()]
            assert rows.tobytes() == subset.rows.tobytes()
            continue
        assert words == [b"The", "été".encode()]
        assert rows.tobytes() == MATRIX[[0, 2]].tobytes()
    table = open_table(tmp_path / "safetensors" / "out.safetensors")
    assert table.texts() == ["<pad>", "The", "absent", "été"]
    assert table.vectors.tobytes() == subset.rows.tobytes()


@pytest.mark.parametrize("name", ["x", "x.csv", "x.TXT", "x.txt.gz"])
def test_a_name_that_says_no_format_is_refused_before_anything_is_read(tmp_path: Path, name: str):
    with pytest.raises(
        OutputError, match=rf"cannot write .*{name}: its suffix is unknown: give -o a name that ends in .safet"
    ):
        check_output(tmp_path / name)
    with pytest.raises((OutputError, EmbeddingError)):
        convert(tmp_path / "absent", tmp_path / name)


def test_a_file_that_cannot_be_used_leaves_what_was_there(source: Path, tmp_path: Path):
    output = tmp_path / "out.vec"
    output.write_text("as it was")
    (tmp_path / "empty").write_bytes(b"a nan\nb inf\n")
    with pytest.raises(EmbeddingError, match="empty has 0 words that can be used: see `plimsoll embeddings info`"):
        convert(tmp_path / "empty", output)
    with pytest.raises(EmbeddingError, match="line 5: 'bad': number 1 of 2 is nan"):
        convert(source, output, strict=True)
    assert output.read_text() == "as it was"
    with pytest.raises(
        OutputError, match=r"cannot write .*out.vec: No such file or directory; free some space or give"
    ):
        convert(source, tmp_path / "no folder" / "out.vec")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "in", "out.vec"]
    convert(source, output)
    assert read(output)[0] == WORDS
