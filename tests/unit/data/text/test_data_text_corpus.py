"""Reading of texts: slices and samples, forks, and files that change after they were indexed."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from corpora import check_all_ways, opened, written
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    written(tmp_path / "texts" / "a.txt", "one\n\ntwo\n")
    written(tmp_path / "texts" / "c.txt", "thr\u00e9e")
    return tmp_path / "texts"


def test_numbers_that_are_none_of_a_text_are_refused(texts: Path):
    corpus = opened(texts)
    assert corpus.texts(np.array([], np.int64)) == []
    for ids in ([3], [-1], [0, 3]):
        with pytest.raises(IndexError, match="texts are numbered from 0 to 2"):
            corpus.texts(np.array(ids))


def test_a_file_that_changes_before_it_is_read_is_said_so(texts: Path):
    corpus = opened(texts)
    os.utime(texts / "a.txt", ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.txt was written to since it was indexed: start again to index it anew"):
        corpus[1]
    (texts / "a.txt").write_text("one")
    with pytest.raises(DataError, match=r"a\.txt has 3 bytes, but had 9 when it was indexed: start again"):
        corpus[1]
    (texts / "c.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*c\.txt \(No such file or directory\): put it back"):
        corpus[2]
    assert list(opened(texts)) == ["one"]


def test_a_file_that_changes_while_it_is_open_is_said_so(texts: Path):
    corpus = opened(texts)
    assert corpus[0] == "one"
    os.truncate(texts / "a.txt", 6)
    with pytest.raises(DataError, match=r"a\.txt has 6 bytes, but had 9 when it was indexed: start again"):
        corpus[1]
    with pytest.raises(DataError, match="has 6 bytes, but had 9"):
        corpus.texts(np.array([1, 0]))
    (texts / "a.txt").write_bytes(b"one\n\nTWO\n")  # has the same size as before
    with pytest.raises(DataError, match=r"a\.txt was written to since it was indexed: start again"):
        corpus[1]
    with pytest.raises(DataError, match="was written to since it was indexed"):
        list(corpus)


def test_bytes_that_are_not_what_was_indexed_are_said_so_even_if_the_time_is(texts: Path):
    corpus, status = opened(texts), os.stat(texts / "a.txt")
    for content, message in (
        (b"one\n\n\xff\xff\xff\n", r"a\.txt is no longer the text that was indexed .*start again"),
        (b"one\n\n\n\n\n\n", r"is no longer the text .*2 lines were indexed and 1 found"),
    ):
        (texts / "a.txt").write_bytes(content)
        os.utime(texts / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(DataError, match=message):
            list(corpus)


def test_forked_processes_read_through_the_same_files_without_a_race(tmp_path: Path):
    lines = [f"line {number} " + "x" * (number % 50) for number in range(20_000)]
    corpus = opened(written(tmp_path / "a.txt", "\n".join(lines)))
    assert corpus[0] == lines[0]  # opens the file before the fork
    children = []
    for seed in range(3):
        pid = os.fork()
        if pid == 0:
            ids = np.random.default_rng(seed).integers(0, len(lines), 5000)
            is_right = all(corpus.texts(some) == [lines[i] for i in some] for some in np.split(ids, 50))
            os._exit(0 if is_right else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


MEASURE = """
import sys
from pathlib import Path
import numpy as np
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus

def private_bytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) << 10

corpus = open_corpus((sys.argv[1],), Reading(unit="line"), Path(sys.argv[2]))
generator, peaks = np.random.default_rng(0), []
for _ in range(2):
    for _ in range(150):
        corpus.texts(generator.integers(0, len(corpus), 1024))
    for _ in corpus:
        pass
    peaks.append(private_bytes())
print(peaks[1] - peaks[0])
"""


def test_reading_keeps_nothing(tmp_path: Path):
    path = written(tmp_path / "a.txt", b"a line of some thirty-odd letters\n" * 1_000_000)
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "cache")]
    assert int(subprocess.check_output(command, text=True)) < 4 << 20


def test_the_table_of_gaps_is_read_where_there_are_some(tmp_path: Path):
    content = b"".join(b"%d\n" % number + (b"\xff\n" if number % 3 == 0 else b"") for number in range(100))
    corpus = open_corpus((str(written(tmp_path / "a.txt", content)),), Reading("line", on_error="skip"), tmp_path)
    check_all_ways(corpus, [str(number) for number in range(100)], [99, 0, 3, 4, 5, 6])


def test_long_texts_come_in_pieces_that_make_up_the_text(tmp_path: Path):
    contents = {
        "words": "some words \u00e9 and\n\n    more " * 20_000,
        "no spaces": "\u20ac" * 100_000,
        "only spaces": "x" + " " * 200_000,
        "short": "x",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_text(content)
    corpus = open_corpus((str(tmp_path / "*.txt"),), Reading(), tmp_path / "cache")
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
        corpus = open_corpus((str(tmp_path / "*.txt"),), Reading(unit=unit), tmp_path / "cache")
        assert "".join(corpus.sample(1 << 30)) == "".join(corpus)
        drawn = list(corpus.sample(128 << 10))
        assert (128 << 10) - 4 * 34 <= sum(len(text) + (unit == "line") for text in drawn) <= (128 << 10) + 4 * 34
        text = "".join(drawn)
        # four slices of 32 KiB, one at the beginning of each quarter, that is of each file
        assert all(f"{part * 5000 + 1:07d} filling" in text for part in range(4))
        assert not any(f"{part * 5000 + 2000:07d}" in text for part in range(4))


def test_a_sample_loses_no_more_than_the_characters_at_its_borders(tmp_path: Path):
    (tmp_path / "a.txt").write_text("\u20ac" * 100_000)
    corpus = open_corpus((str(tmp_path / "a.txt"),), Reading(), tmp_path / "cache")
    assert {character for text in corpus.sample(64 << 10) for character in text} == {"\u20ac"}
