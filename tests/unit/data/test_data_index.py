"""Texts by number from real files: what is found, what is refused, what is cached, how it is cut and drawn from."""

import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from plimsoll.data.index import Corpus, open_corpus
from plimsoll.errors import DataError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n\ntwo\n")
    (folder / "b.txt").write_text("")
    (folder / "c.txt").write_text("thr\u00e9e")
    return folder


def opened(texts: Path, unit: str = "line") -> Corpus:
    return open_corpus((str(texts),), unit, texts.parent / "cache")


def test_lines_and_documents_by_number(texts: Path):
    lines, documents = opened(texts), opened(texts, "document")
    assert [list(lines), len(lines), lines[-1]] == [["one", "two", "thr\u00e9e"], 3, "thr\u00e9e"]
    assert list(documents) == ["one\n\ntwo\n", "thr\u00e9e"]
    assert lines.paths == (texts / "a.txt", texts / "c.txt")  # b.txt has no text
    assert [lines.source_of(number).name for number in (0, 1, 2, -1)] == ["a.txt", "a.txt", "c.txt", "c.txt"]
    assert lines.num_texts_of_paths.tolist() == [2, 1]
    assert (lines.num_bytes, documents.num_bytes) == (3 + 3 + 6, 9 + 6)
    with pytest.raises(IndexError):
        lines[3]
    with pytest.raises(IndexError):
        lines.source_of(-4)


def test_the_key_says_the_content_and_not_where_it_is(texts: Path):
    key = opened(texts).key
    assert opened(texts, "document").key != key
    moved = texts.rename(texts.with_name("moved"))
    os.utime(moved / "a.txt")
    assert opened(moved).key == key
    (moved / "a.txt").write_text("one\n\ntwO\n")
    assert opened(moved).key != key


def test_a_border_between_files_is_part_of_the_content(tmp_path: Path):
    keys = set()
    for number, parts in enumerate((("a\n", "b\n"), ("a\nb\n",))):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, part in enumerate(parts):
            (folder / f"{name}.txt").write_text(part)
        keys.add(opened(folder).key)
    assert len(keys) == 2


def test_files_of_a_folder_that_are_no_text_are_left_out_with_the_reason(texts: Path):
    (texts / "image.png").write_bytes(b"\x89PNG\0")
    late = b"good line\n" * 60_000 + b"\xff"  # beyond the first chunk: what was indexed of it is taken back
    (texts / "bad.txt").write_bytes(late)
    corpus = opened(texts)
    assert list(corpus) == ["one", "two", "thr\u00e9e"]
    assert [Path(entry.partition(": ")[0]).name for entry in corpus.skipped] == ["bad.txt", "image.png"]
    assert "byte 600000 (0xff) is not UTF-8" in corpus.skipped[0]
    assert "byte 0 (0x89)" in corpus.skipped[1] or "byte 4 is NUL" in corpus.skipped[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9", r"bad\.txt as text: byte 3 \(0xe9\) is not UTF-8 .*iconv -f latin1 -t utf-8"),
        (b"a\0b", r"bad\.txt as text: byte 1 is NUL"),
        (b"", "the only text file of .*bad.txt holds nothing but white space: give files with text"),
        (b" \n\t\r\n", "the only text file of .*bad.txt holds nothing but white space"),
    ],
)
def test_a_file_named_itself_must_be_text(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_corpus((str(tmp_path / "bad.txt"),), "line", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("index-*[!k]"))  # only the lock


def test_a_folder_without_text_is_an_error_with_its_own_text(tmp_path: Path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"the only file of .* is not UTF-8 text, the first: .*a\.bin: byte 0 is NUL"):
        opened(tmp_path / "x")


def test_an_index_is_built_once(texts: Path):
    stages = []
    for _ in range(2):
        open_corpus((str(texts),), "line", texts.parent / "cache", lambda *progress: stages.append(progress))
    assert stages == [("index", 9, 15), ("index", 15, 15)]


def test_a_corpus_is_pickled_as_the_name_of_its_index(texts: Path):
    corpus = opened(texts)
    corpus[0]  # with a file open
    raw = pickle.dumps(corpus)
    assert len(raw) < 500
    assert list(pickle.loads(raw)) == list(corpus)


def test_a_file_that_changes_while_it_is_used_is_said_so(texts: Path):
    corpus = opened(texts)
    (texts / "a.txt").write_text("one")
    with pytest.raises(DataError, match=r"a\.txt ends before byte 8"):
        corpus[1]
    (texts / "a.txt").write_bytes(b"one\n\n\xff\xff\xff\n")
    with pytest.raises(DataError, match=r"a\.txt is not the UTF-8 text it was"):
        corpus[1]
    (texts / "c.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*c\.txt \(No such file or directory\)"):
        corpus[2]


def test_long_texts_come_in_pieces_that_make_up_the_text(tmp_path: Path):
    contents = {
        "words": "some words \u00e9 and\n\n    more " * 20_000,
        "no spaces": "\u20ac" * 100_000,
        "only spaces": "x" + " " * 200_000,
        "short": "x",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_text(content)
    corpus = open_corpus((str(tmp_path / "*.txt"),), "document", tmp_path / "cache")
    whole, parts = [], []
    for piece, is_last in corpus.pieces():
        assert 0 < len(piece.encode()) <= 64 << 10
        parts.append(piece)
        if is_last:
            whole.append(parts)
            parts = []
    assert parts == []
    assert ["".join(parts) for parts in whole] == list(corpus) == [contents[name] for name in sorted(contents)]
    of_words = whole[sorted(contents).index("words")]
    assert all(before[-1] != " " and after[0] == " " for before, after in pairwise(of_words))


def test_a_sample_is_everything_or_evenly_spaced(tmp_path: Path):
    lines = [f"{number:07d} filling up the line to 32" for number in range(20_000)]
    assert {len(line) for line in lines} == {33}
    for part in range(4):
        (tmp_path / f"{part}.txt").write_text("\n".join(lines[part * 5000 : (part + 1) * 5000]))
    for unit in ("line", "document"):
        corpus = open_corpus((str(tmp_path / "*.txt"),), unit, tmp_path / "cache")
        assert "".join(corpus.sample(1 << 30)) == "".join(corpus)
        drawn = list(corpus.sample(128 << 10))
        assert sum(len(text) for text in drawn) == 128 << 10
        text = "".join(drawn)
        # four slices of 32 KiB, one at the begin of each quarter, that is of each file
        assert all(f"{part * 5000 + 1:07d} filling" in text for part in range(4))
        assert not any(f"{part * 5000 + 2000:07d}" in text for part in range(4))


def test_a_sample_loses_no_more_than_the_characters_at_its_borders(tmp_path: Path):
    (tmp_path / "a.txt").write_text("\u20ac" * 100_000)
    corpus = open_corpus((str(tmp_path / "a.txt"),), "document", tmp_path / "cache")
    assert {character for text in corpus.sample(64 << 10) for character in text} == {"\u20ac"}


MEASURE = """
import sys
from itertools import pairwise
from pathlib import Path
from plimsoll.data.index import open_corpus

def private_bytes():
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096

small = open_corpus((sys.argv[1],), "line", Path(sys.argv[3]))
before = peak = private_bytes()

def watch(stage, done, total):
    global peak
    peak = max(peak, private_bytes())

corpus = open_corpus((sys.argv[2],), "line", Path(sys.argv[3]), watch)
print(len(corpus), peak - before)
"""


def test_indexing_takes_the_same_memory_for_any_size(tmp_path: Path):
    (tmp_path / "small.txt").write_text("a line\n" * 100_000)
    with (tmp_path / "large.txt").open("w") as file:
        for _ in range(40):
            file.write("a line\n" * 100_000)
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in ("small.txt", "large.txt", "cache"))]
    num_lines, grown_bytes = map(int, subprocess.check_output(command, text=True).split())
    assert num_lines == 4_000_000
    assert grown_bytes < 16 << 20  # the index alone has 61 MiB
