"""Texts by number from real files: which texts are found, refused and cached, and how much memory this takes."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from corpora import check_all_ways, written
from plimsoll.data.formats import Reading
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError, OutputError, PlimsollWarning


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n\ntwo\n")
    (folder / "b.txt").write_text("")
    (folder / "c.txt").write_text("thr\u00e9e")
    return folder


def opened(texts: Path, unit: str = "line") -> Corpus:
    return open_corpus((str(texts),), Reading(unit=unit), texts.parent / "cache")


def test_lines_and_documents_by_number(texts: Path):
    lines, documents = opened(texts), opened(texts, "document")
    assert [list(lines), len(lines), lines[-1]] == [["one", "two", "thr\u00e9e"], 3, "thr\u00e9e"]
    assert list(documents) == ["one\n\ntwo\n", "thr\u00e9e"]
    assert lines.paths == (texts / "a.txt", texts / "c.txt")  # b.txt is empty
    assert lines.num_texts_of_paths.tolist() == [2, 1]
    assert (lines.num_bytes, documents.num_bytes) == (9 + 6, 9 + 6)  # including line ends
    with pytest.raises(IndexError):
        lines[3]


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
    # the fault lies after the first chunk, so the rows already indexed are removed
    late = b"good line\n" * 60_000 + b"\xff"
    (texts / "bad.txt").write_bytes(late)
    with pytest.warns(
        PlimsollWarning, match=r"1 of 3 files \(585\.9 KiB\) are left out entirely .*bad\.txt: line 60001: byte"
    ):
        corpus = opened(texts)
    with pytest.warns(PlimsollWarning, match="to leave out only their faulty texts, set on_error: skip"):
        opened(texts)  # the warning comes each time
    assert list(corpus) == ["one", "two", "thr\u00e9e"]
    assert [Path(entry.partition(": ")[0]).name for entry in corpus.skipped] == ["image.png", "bad.txt"]
    assert "byte 4 is NUL" in corpus.skipped[0]
    assert "byte 600000 (0xff) is not UTF-8" in corpus.skipped[1]
    assert [path.name for path in corpus.left_out] == ["b.txt", "bad.txt", "image.png"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9", r"bad\.txt as text: line 1: byte 3 \(0xe9\) is not UTF-8 .*iconv -f latin1 -t utf-8"),
        (b"a\0b", r"bad\.txt as text: line 1: byte 1 is NUL"),
        (b"", "the only text file of .*bad.txt holds nothing but white space: give files with text"),
        (b" \n\t\r\n", "the only text file of .*bad.txt holds nothing but white space"),
    ],
)
def test_a_file_named_itself_must_be_text(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_corpus((str(tmp_path / "bad.txt"),), Reading(unit="line"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("index-*[!k]"))  # only the lock is left


def test_a_folder_without_text_is_an_error_with_its_own_text(tmp_path: Path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.bin").write_bytes(b"\0")
    with pytest.raises(
        DataError, match=r"the only file of .* is not UTF-8 text, the first: .*a\.bin: line 1: byte 0 is NUL"
    ):
        opened(tmp_path / "x")


def test_an_index_is_built_once(texts: Path):
    stages = []
    for _ in range(2):
        open_corpus(
            (str(texts),), Reading(unit="line"), texts.parent / "cache", lambda *progress: stages.append(progress)
        )
    assert stages == [("index", 9, 15), ("index", 15, 15)]


def test_a_corpus_is_pickled_as_the_name_of_its_index(texts: Path):
    corpus = opened(texts)
    corpus[0]  # opens a file
    raw = pickle.dumps(corpus)
    assert len(raw) < 500
    assert list(pickle.loads(raw)) == list(corpus)


def test_mixed_files_are_told_by_their_names_and_keep_their_order(tmp_path: Path):
    folder = tmp_path / "texts"
    written(folder / "a.csv", "text\none\n")
    written(folder / "b.JSONL", '{"text": "two"}\n')
    written(folder / "c.md", "three\n")
    written(folder / "d.tsv", "id\ttext\n1\tfour\n")
    corpus = opened(folder)
    check_all_ways(corpus, ["one", "two", "three", "four"], [3, 0, 2])
    assert [path.name for path in corpus.paths] == ["a.csv", "b.JSONL", "c.md", "d.tsv"]


def test_many_small_files_are_one_corpus(tmp_path: Path):
    # more than may be open at once, or than one task has
    texts = [f"text {number}\nsecond line" for number in range(700)]
    for number, text in enumerate(texts):
        written(tmp_path / "texts" / f"{number:03d}.txt", text)
    corpus = opened(tmp_path / "texts", "document")
    check_all_ways(corpus, texts, [699, 3, 3, 400, 12])
    before = corpus.key
    (tmp_path / "texts" / "699.txt").write_text("text 699\nsecond lina")
    os.utime(tmp_path / "texts" / "699.txt", ns=(0, 0))
    assert opened(tmp_path / "texts", "document").key != before


def test_an_edit_that_keeps_size_and_time_is_found_by_the_sample(tmp_path: Path):
    path = written(tmp_path / "a.txt", "first line\n" * 100_000)
    status = path.stat()
    key = opened(path).key
    for place in (0, path.stat().st_size // 7, path.stat().st_size - 5):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"X")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert opened(path).key not in {key}
        key = opened(path).key


def test_what_is_skipped_is_counted_and_the_first_hundred_are_listed(tmp_path: Path):
    path = written(tmp_path / "a.txt", b"good\nb\xffd\n" * 150 + b"last")
    corpus = open_corpus((str(path),), Reading("line", on_error="skip"), tmp_path / "cache")
    check_all_ways(corpus, ["good"] * 150 + ["last"], [150, 0])
    assert (corpus.num_skipped, len(corpus.skipped)) == (150, 100)
    path = written(tmp_path / "b.txt", b"b\xffd\n" * 3)
    with pytest.raises(
        DataError, match=r"nothing is left of .*b\.txt: 3 rows or files were skipped, the first: .*byte 1"
    ):
        open_corpus((str(path),), Reading("line", on_error="skip"), tmp_path / "cache")


def test_long_stretches_of_blank_lines_are_not_read_with_a_text(tmp_path: Path):
    blank = b"\n" * (3 << 20)
    path = written(tmp_path / "a.txt", blank + b"one\r\n" + blank + b"two\n" + blank)
    for unit in ("line", "paragraph"):
        corpus = opened(path, unit)
        check_all_ways(corpus, ["one", "two"], [1, 0])
        assert corpus.byte_lengths(np.array([0, 1])).tolist() == [4, 3]


def test_an_index_that_cannot_be_written_is_an_output_error_and_leaves_nothing(texts: Path):
    texts.parent.joinpath("cache").write_text("a file is in the way")
    with pytest.raises(OutputError, match="cannot write the cache"):
        opened(texts)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
open_corpus((sys.argv[1],), Reading(unit="line"), Path(sys.argv[2]))
"""


def test_a_disk_that_is_full_while_indexing_is_said_and_nothing_is_left(tmp_path: Path):
    path = written(tmp_path / "a.txt", b"a line\n" * 300_000)
    command = [sys.executable, "-c", LIMITED, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "plimsoll.errors.OutputError: cannot write the cache" in done.stderr
    assert "File too large; free some space" in done.stderr
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus

def interrupt(stage, done, total):
    if done > total // 4:
        os.killpg(0, signal.SIGINT)  # as a terminal does, to the workers too

os.setsid()
open_corpus((sys.argv[1],), Reading(), Path(sys.argv[2]), interrupt)
"""


def test_an_interrupt_ends_all_processes_and_leaves_nothing(tmp_path: Path):
    # large enough to be scanned by processes
    path = written(tmp_path / "a.jsonl", b'{"text": "%s"}\n' % (b"some words " * 100) * 16_000)
    command = [sys.executable, "-c", INTERRUPTED, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert done.stderr.count("Traceback") == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(open_corpus((str(path),), Reading(), tmp_path / "cache")) == 16_000


MEASURE = """
import sys
from pathlib import Path
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus

def private_bytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) << 10

small = open_corpus((sys.argv[1],), Reading(unit="line"), Path(sys.argv[3]))
before = peak = private_bytes()

def watch(stage, done, total):
    global peak
    peak = max(peak, private_bytes())

corpus = open_corpus((sys.argv[2],), Reading(unit="line"), Path(sys.argv[3]), watch)
print(len(corpus), peak - before)
"""


def test_indexing_takes_the_same_memory_for_any_size(tmp_path: Path):
    (tmp_path / "small.txt").write_text("a line\n" * 100_000)
    with (tmp_path / "large.txt").open("w") as file:
        for _ in range(160):
            file.write("a line\n" * 100_000)
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in ("small.txt", "large.txt", "cache"))]
    num_lines, grown_bytes = map(int, subprocess.check_output(command, text=True).split())
    assert num_lines == 16_000_000
    assert grown_bytes < 40 << 20  # the index alone has 122 MiB


SPARSE = """
import resource, sys
from pathlib import Path
import numpy as np
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))
corpus = open_corpus((sys.argv[1],), Reading(unit="line", on_error="skip"), Path(sys.argv[2]))
print(len(corpus), corpus[-1], corpus.num_skipped, corpus.texts(np.array([0, len(corpus) - 1])), *corpus.skipped)
"""


def test_a_sparse_file_is_indexed_and_read_in_little_memory(tmp_path: Path):
    """A sparse file is indexed and read in little memory.

    Holes are NUL bytes, and each is one skipped row. Each island of lines begins with a newline that ends the hole.
    """
    path = tmp_path / "sparse.txt"
    num_bytes, island = 4 << 30, b"\n" + b"".join(b"line %d\n" % number for number in range(2000))
    with path.open("wb") as file:
        for place in (0, 3 << 20, num_bytes // 2 + 12_345, num_bytes - len(island)):
            file.seek(place)
            file.write(island)
    command = [sys.executable, "-c", SPARSE, str(path), str(tmp_path / "cache")]
    words = subprocess.check_output(command, text=True)
    assert words.startswith("8000 line 1999 3 ['line 0', 'line 1999'] ")
    assert f"byte {len(island)} is NUL" in words
    with pytest.raises(DataError, match=rf"byte {len(island)} is NUL: remove it; set on_error: skip"):
        opened(path)


def test_an_edit_behind_the_same_size_and_time_is_indexed_anew(tmp_path: Path):
    path = tmp_path / "a.txt"
    lines = [f"line {number:06d}\n" for number in range(20_000)]
    path.write_text("".join(lines))
    status = path.stat()
    corpus = opened(path)
    lines[9001:9003] = ["line\n009001\n", "line 9002  \n"]  # far from the sampled bytes
    path.write_text("".join(lines))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert list(opened(path)) == "".join(lines).splitlines()
    assert opened(path).key != corpus.key


def test_an_index_whose_text_no_longer_decodes_is_made_anew_at_the_next_start(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    corpus, status = opened(path), path.stat()
    path.write_bytes(b"\xffne\ntwo\n")
    os.utime(path, ns=(0, status.st_mtime_ns))
    with pytest.raises(DataError, match="is no longer the text that was indexed .*start again to index it anew"):
        corpus[0]
    assert not (corpus.folder / "manifest.json").exists()
