"""A corpus in a store or on a web server is bit for bit what its files are here, in every format and in little room."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.web_server import Site, serving

from plimsoll.data.formats import Reading
from plimsoll.data.index import open_corpus
from plimsoll.data.loader import Loader
from plimsoll.errors import DataError

pytest.importorskip("aiohttp", reason="http addresses need aiohttp")

TEXTS = [f"text {number} of the store, with a comma, and ü\n" * (1 + number % 3) for number in range(40)]


def contents() -> dict[str, bytes]:
    """One corpus in each format."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), sink)
    quoted = "text\n" + "".join('"' + text + '"\n' for text in TEXTS)
    return {
        "a.txt": "\n".join(TEXTS).encode(), "a.jsonl": rows, "a.jsonl.gz": gzip.compress(rows, mtime=0),
        "a.csv": quoted.encode(), "a.parquet": sink.getvalue().to_pybytes(),
    }  # fmt: skip


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    opened = fsspec.filesystem("memory")
    opened.store.clear()
    yield opened
    opened.store.clear()


@pytest.mark.parametrize("name", list(contents()))
@pytest.mark.parametrize("where", ["file", "memory", "http"])
def test_texts_are_those_of_the_files_here(tmp_path: Path, memory, name: str, where: str):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / name).write_bytes(contents()[name])
    reading = Reading(unit="line") if name == "a.txt" else Reading()
    expected = open_corpus([str(folder / name)], reading, tmp_path / "cache-here")
    memory.pipe(f"/c/{name}", contents()[name])
    with serving(Site(contents())) as site:
        addresses = {
            "file": f"file://{folder}/{name}",
            "memory": f"memory://c/{name}",
            "http": f"{site.address}/{name}",
        }
        found = open_corpus([addresses[where]], reading, tmp_path / "cache-there")
        assert list(found) == list(expected)
        assert found.key == expected.key
        assert str(found.paths[0]).endswith(f"/{name}")
        again = open_corpus([addresses[where]], reading, tmp_path / "cache-there")
        assert again.folder == found.folder


def test_a_corpus_larger_than_its_copies_may_take_is_read_at_random(tmp_path: Path, memory, monkeypatch):
    for number in range(8):
        memory.pipe(f"/c/{number}.txt", f"line of file {number}\n".encode() * 100)
    monkeypatch.setenv("PLIMSOLL_COPIES", "4KiB")
    corpus = open_corpus(["memory://c/*.txt"], Reading(unit="line"), tmp_path)
    assert len(corpus) == 800
    ids = np.random.default_rng(0).permutation(800)
    assert corpus.texts(ids) == [f"line of file {number // 100}" for number in ids]
    kept = sum(path.stat().st_size for path in (tmp_path / "copies").glob("*/*.txt"))
    assert kept <= 4096


def test_a_file_that_changed_in_the_store_makes_another_corpus_and_stops_the_old_one(tmp_path: Path):
    with serving(Site({"a.txt": b"one\ntwo\n"})) as site:
        address = f"{site.address}/a.txt"
        before = open_corpus([address], Reading(unit="line"), tmp_path)
        site.files["a.txt"] = b"one\nsix\n"
        after = open_corpus([address], Reading(unit="line"), tmp_path)
        assert list(after) == ["one", "six"]
        assert before.folder != after.folder
        with pytest.raises(DataError, match="was written to since it was indexed"):
            list(before)


def test_ranks_share_a_corpus_elsewhere_without_overlap(tmp_path: Path, memory):
    for number in range(3):
        memory.pipe(f"/c/{number}.txt", b"a line\n" * 17)
    corpus = open_corpus(["memory://c/*.txt"], Reading(unit="line"), tmp_path)

    class Numbers:
        def __len__(self) -> int:
            return len(corpus)

        def batch(self, ids, epoch=0):
            return {"ids": ids, "texts": corpus.texts(ids)}

    seen = []
    for rank in range(4):
        loader = Loader(Numbers(), 10, rank=rank, world_size=4)
        seen += [number for fields in loader for number in (fields["ids"].tolist() if fields else [])]
    assert sorted(seen) == list(range(51))
