"""Conversion of compressed files and tables before indexing: once, complete or not at all."""

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from corpora import check_all_ways, opened, written
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError

TEXTS = ["one", 'two\nlines, "quoted"', "caf\u00e9 \U0001f600", "x" * 70_000]


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def as_jsonl() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def as_csv() -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["text"], *([text] for text in TEXTS)])
    return file.getvalue().encode()


def as_parquet() -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".GZ"])
@pytest.mark.parametrize(("name", "make"), [("a.jsonl", as_jsonl), ("a.csv", as_csv), ("a.parquet", as_parquet)])
def test_compressed_files_hold_the_texts_of_what_they_hold(
    tmp_path: Path, name: str, make: Callable[[], bytes], suffix: str
):
    pack = zstd if suffix == ".zst" else gzip.compress
    plain = opened(written(tmp_path / "plain" / name, make()))
    path = written(tmp_path / f"{name}{suffix}", pack(make()))
    corpus = opened(path)
    check_all_ways(corpus, TEXTS, [3, 0, 1])
    assert corpus.key == plain.key
    assert corpus.paths == (path,)


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_files_of_several_members_are_read_to_their_end(tmp_path: Path, pack: Callable[[bytes], bytes]):
    suffix = ".gz" if pack is gzip.compress else ".zst"
    path = written(tmp_path / f"a.txt{suffix}", pack(b"one\n") + pack(b"two\n"))
    assert list(opened(path)) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("tear", ["short", "other"])
def test_a_torn_archive_is_said_and_leaves_nothing(tmp_path: Path, name: str, tear: str):
    content = {"a.txt.gz": gzip.compress, "a.txt.zst": zstd}.get(name, lambda _: as_parquet())(
        bytes(range(1, 255)) * 999
    )
    path = written(tmp_path / name, content[:-20] if tear == "short" else b"something else altogether")
    with pytest.raises(DataError, match=rf"cannot (unpack|read) .*{name}.*write it again, or leave it out"):
        opened(path)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


def test_what_is_converted_is_converted_once_with_progress(tmp_path: Path):
    content = ("some words of a line\n" * 300_000).encode()
    path = written(tmp_path / "a.txt.gz", gzip.compress(content, 1))
    stages: list[tuple[str, int, int]] = []
    for unit in ("line", "document"):
        open_corpus((str(path),), Reading(unit), tmp_path / "cache", lambda *step: stages.append(step))
    converted = [(done, total) for stage, done, total in stages if stage == "convert"]
    assert len(converted) >= 6
    assert converted[-1] == (path.stat().st_size,) * 2
    assert sorted(done for done, _ in converted) == [done for done, _ in converted]


FULL = """
import resource, sys
from pathlib import Path
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
open_corpus((sys.argv[1],), Reading(unit="line"), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("name", ["a.txt.gz", "a.parquet"])
def test_a_disk_that_is_full_while_converting_is_said_and_nothing_is_left(tmp_path: Path, name: str):
    path = tmp_path / name
    if name == "a.txt.gz":
        path.write_bytes(gzip.compress(b"a line\n" * 400_000))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a line"] * 400_000}), path)
    command = [sys.executable, "-c", FULL, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "plimsoll.errors.OutputError: cannot write the cache" in done.stderr
    assert "File too large; free some space" in done.stderr
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


MEASURE = """
import sys
from pathlib import Path
import pyarrow.parquet
from plimsoll.data.text import tables
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus

def private_bytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) << 10

open_corpus((sys.argv[1],), Reading(), Path(sys.argv[3]))
before = peak = private_bytes()

def watch(stage, done, total):
    global peak
    peak = max(peak, private_bytes())

corpus = open_corpus((sys.argv[2],), Reading(), Path(sys.argv[3]), watch)
print(len(corpus), peak - before)
"""


def test_converting_a_table_takes_bounded_memory(tmp_path: Path):
    """Converting a table with one row group of 100 MB, the default of writers, takes bounded memory."""
    texts = pyarrow.array([f"{number} some words of a row " * 20 for number in range(4000)] * 50)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "large.parquet", use_dictionary=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[:5000]}), tmp_path / "small.parquet")
    names = [str(tmp_path / name) for name in ("small.parquet", "large.parquet", "cache")]
    num_texts, grown_bytes = map(int, subprocess.check_output([sys.executable, "-c", MEASURE, *names]).split())
    assert num_texts == 200_000
    assert grown_bytes < 48 << 20


@pytest.mark.parametrize(("suffix", "pack"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_bzip2_and_xz_are_read(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]):
    assert list(opened(written(tmp_path / f"a.jsonl{suffix}", pack(as_jsonl())))) == TEXTS


def test_the_files_of_an_archive_are_texts_by_its_name_and_theirs(tmp_path: Path):
    files = {"b/a.jsonl": as_jsonl(), "c.txt": b"one\ntwo\n", "d.txt.gz": gzip.compress(b"three\n"), "e.zip": b"PK"}
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    corpus = opened(tmp_path / "all.zip")
    assert list(corpus) == [*TEXTS, "one", "two", "three"]
    assert corpus.paths == tuple(tmp_path / "all.zip" / name for name in files if name != "e.zip")
    assert corpus.skipped == (f"{tmp_path}/all.zip/e.zip: it is an archive in an archive: unpack it",)
    with tarfile.open(tmp_path / "all.tgz", "w:gz") as tar:
        info = tarfile.TarInfo("c.txt")
        info.size = 8
        tar.addfile(info, io.BytesIO(b"one\ntwo\n"))
    assert list(opened(tmp_path / "all.tgz")) == ["one", "two"]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_json_objects_is_no_text_but_a_table(tmp_path: Path, indent: int | None):
    path = written(tmp_path / "a.json", json.dumps([{"text": text, "n": 1} for text in TEXTS], indent=indent))
    assert list(opened(path)) == TEXTS
    assert list(opened(written(tmp_path / "b.json", as_jsonl()))) == TEXTS
    assert list(opened(written(tmp_path / "c.json", json.dumps({"text": "one"}, indent=indent)))) == ["one"]
    packed = written(tmp_path / "d.json.gz", gzip.compress(path.read_bytes()))
    assert list(opened(packed)) == TEXTS


def test_json_that_is_no_list_of_texts_is_an_error_or_said(tmp_path: Path):
    path = written(tmp_path / "x" / "a.json", json.dumps({"a": [{"text": "one"}], "b": [{"text": "one"}]}, indent=2))
    with pytest.raises(DataError, match=r"a\.json as text: it is one object with 2 lists of objects"):
        opened(path)
    broken = written(tmp_path / "x" / "b.json", '[\n{"text": "one"},\n{"text": two}]')
    with pytest.raises(DataError, match=r"b\.json as text: line 3: it is not a list of JSON objects"):
        opened(broken)
    written(tmp_path / "x" / "c.txt", "one\n")
    corpus = opened(tmp_path / "x", on_error="skip")
    assert list(corpus) == ["one"]
    assert [Path(entry.partition(":")[0]).name for entry in corpus.skipped] == ["a.json", "b.json"]


def test_what_a_binary_file_is_is_said(tmp_path: Path):
    path = written(tmp_path / "a.txt", gzip.compress(bytes(99)))
    with pytest.raises(
        DataError, match=r"its first bytes are the signature of gzip: leave it out, or rename it to end in \.gz"
    ):
        opened(path)


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        (b"7z\xbc\xaf\x27\x1c", "7z: leave it out, or unpack it"),
        (b"Rar!\x1a\x07\x01", "rar: leave it out, or unpack it"),
        (b"\x28\xb5\x2f\xfd", r"zstd: leave it out, or rename it to end in \.zst"),
        (b"\x04\x22\x4d\x18", "lz4: leave it out, or unpack it"),
        (b"BZh9", r"bzip2: leave it out, or rename it to end in \.bz2"),
        (b"PAR1", r"parquet: leave it out, or rename it to end in \.parquet"),
        (b"%PDF-1.7", "PDF: leave it out, or extract its text"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file"),
        (b"\x89PNG\r\n\x1a\n", "a picture"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.7z", "a.jsonl", "a.csv"])
def test_binary_files_are_told_by_their_first_bytes_without_a_null_byte_too(
    tmp_path: Path, name: str, begin: bytes, kind: str
):
    path = written(tmp_path / "x" / name, begin + b"\xff\xc3\x28" * 9)
    with pytest.raises(DataError, match=rf"first bytes are the signature of {kind}"):
        opened(path)
    written(tmp_path / "x" / "b.txt", "BZh is how bzip2 begins\n")
    if not name.endswith((".jsonl", ".csv")):
        corpus = opened(tmp_path / "x")
        assert list(corpus) == ["BZh is how bzip2 begins"]
        assert kind.partition(":")[0] in corpus.skipped[0]


def test_a_character_that_the_first_look_cuts_is_text(tmp_path: Path):
    for num_bytes in range(7996, 8001):
        content = "PAR1" + "x" * (num_bytes - 4) + "\U0001f600"
        assert list(opened(written(tmp_path / f"{num_bytes}.txt", content))) == [content]
