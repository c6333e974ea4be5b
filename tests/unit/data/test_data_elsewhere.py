"""Remote corpora have the same bytes as their local files, in every format and in little memory."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.web_server import Site, serving

from plimsoll.data.batches.loader import Loader
from plimsoll.data.datasets import open_datasets
from plimsoll.data.formats import Reading
from plimsoll.data.prepare import prepare
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError
from plimsoll.files import addresses, remote
from plimsoll.models.assemble import loader_of
from plimsoll.records.job import Job

pytest.importorskip("aiohttp", reason="http addresses need aiohttp")

TEXTS = [f"text {number} of the store, with a comma, and ü\n" * (1 + number % 3) for number in range(40)]


def contents() -> dict[str, bytes]:
    """Return one corpus in each format."""
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


@pytest.mark.sampled(3)
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
        places = {
            "file": f"file://{folder}/{name}",
            "memory": f"memory://c/{name}",
            "http": f"{site.address}/{name}",
        }
        found = open_corpus([places[where]], reading, tmp_path / "cache-there")
        assert list(found) == list(expected)
        assert found.key == expected.key
        assert str(found.paths[0]).endswith(f"/{name}")
        again = open_corpus([places[where]], reading, tmp_path / "cache-there")
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


WAYS = {
    "windows": {},
    "stride": {"stride": 8},
    "by_length": {"order": "by_length", "unit": "line", "borders": "sentence"},
    "blocks": {"order": "blocks"},
    "pack": {"pack": True, "unit": "line"},
    "streams": {"order": "streams"},
    "on_the_fly": {"on_the_fly": True, "unit": "line", "long_texts": "truncate"},
    "on_the_fly_blocks": {"on_the_fly": True, "unit": "line", "long_texts": "truncate", "order": "blocks"},
    "workers": {"on_the_fly": True, "unit": "line", "long_texts": "truncate", "workers": 2},
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("way", list(WAYS))
def test_any_number_of_ranks_trains_each_sample_once_in_the_same_batches(tmp_path: Path, way: str):
    """Any number of ranks trains each sample once in the same batches, even if the number changes within an epoch."""
    numbers = np.random.default_rng(0).integers(0, 50, (90, 12))
    text = "\n".join(" ".join(f"w{number}" for number in row[: 2 + row[0] // 5]) for row in numbers).encode()
    with serving(Site({"a.txt": text, "b.txt": text[:500]})) as site:
        job = Job.model_validate(
            {
                "model": {"architecture": "gpt2"}, "sequence_length": 16, "batch_size": 7,
                "data": {"train": [f"{site.address}/a.txt", f"{site.address}/b.txt"], **WAYS[way]},
                "tokenizer": {"train": "bpe", "vocab_size": 270},
            }
        )  # fmt: skip
        samples, _ = open_datasets(prepare(job, tmp_path), job)
        alone, _ = batches_of_ranks(job, samples, 1, None, None)
        assert sorted(number for ids, _ in alone for number in ids) == list(range(len(samples)))
        for world_size in (2, 3, 5):
            first, state = batches_of_ranks(job, samples, world_size, None, len(alone) // 2)
            rest, _ = batches_of_ranks(job, samples, world_size % 5 + 1, state, None)
            assert first + rest == alone


def batches_of_ranks(job, samples, world_size, state, most_batches):
    """Return the sample numbers and labels of each batch of an epoch, combined from all ranks."""
    loaders = [loader_of(job, samples, ranks=SimpleNamespace(rank=r, world_size=world_size)) for r in range(world_size)]
    for loader in loaders:
        loader.load_state_dict(state or loader.state_dict())
    batches = []
    while len(batches) != most_batches and (parts := [loader.peek() for loader in loaders])[0].epoch == 0:
        num_samples = sum(len(part.sample_ids) for part in parts)
        ids, labels = [-1] * num_samples, [[]] * num_samples
        for rank, part in enumerate(parts):
            ids[rank::world_size] = part.sample_ids.tolist()
            labels[rank::world_size] = [row[row != -100].tolist() for row in part.fields.get("labels", ())]
        batches.append((ids, labels))
        for loader in loaders:
            loader.advance()
    for loader in loaders:
        loader.close()
    return batches, loaders[0].state_dict()


def test_how_much_has_come_is_told(tmp_path: Path):
    told = []
    contents = {"a.txt": b"a line\n" * 10_000, "b.txt": b"b line\n" * 20_000}
    with serving(Site(contents)) as site:
        places = [f"{site.address}/{name}" for name in contents]
        open_corpus(places, Reading(unit="line"), tmp_path, lambda *said: told.append(said))
    copied = [said for said in told if said[0] == "copy"]
    assert copied == []  # a small file is copied when it is inspected
    assert told[-1] == ("index", 210_000, 210_000)


def test_how_much_has_come_of_large_files_is_told_and_they_come_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(remote, "_WORTH_A_HEAD_BYTES", 1)
    monkeypatch.setattr(addresses, "PIECE_BYTES", 50_000)
    told = []
    contents = {"a.txt": b"a line\n" * 10_000, "b.txt": b"b line\n" * 20_000}
    with serving(Site(contents)) as site:
        corpus = open_corpus(
            [f"{site.address}/{name}" for name in contents], Reading(unit="line"), tmp_path,
            lambda *said: told.append(said),
        )  # fmt: skip
        assert len(corpus) == 30_000
        most = {name: len(content) for name, content in contents.items()}
        assert (
            sum(most.values()) <= site.num_sent_bytes <= sum(most.values()) + 2 * 3 * 8_000
        )  # plus three file heads for each of two files
    copied = [said for said in told if said[0] == "copy"]
    assert copied[-1] == ("copy", 210_000, 210_000)
    assert [done for _, done, _ in copied] == sorted(done for _, done, _ in copied)


def test_copies_that_had_to_go_are_not_kept_open(tmp_path: Path, memory, monkeypatch):
    for number in range(8):
        memory.pipe(f"/c/{number}.txt", f"line of file {number}\n".encode() * 100)
    monkeypatch.setenv("PLIMSOLL_COPIES", "4KiB")  # enough for two files
    corpus = open_corpus(["memory://c/*.txt"], Reading(unit="line"), tmp_path)
    for number in range(800):
        corpus.texts(np.array([number]))
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    assert len([link for link in links if str(tmp_path) in link and "/copies/" in link]) <= 2


def _is_open(descriptor: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def test_secrets_are_in_no_index(tmp_path: Path):
    with serving(Site({"a.txt": b"one\n", "b.txt": b" "})) as site:
        address = site.address.replace("http://", "http://me:hunter2@")
        corpus = open_corpus([f"{address}/a.txt?sig=hunter2"], Reading(unit="line"), tmp_path)
        with pytest.raises(DataError, match="nothing but white space") as raised:
            open_corpus([f"{address}/b.txt?sig=hunter2"], Reading(unit="line"), tmp_path)
    assert "hunter2" not in str(raised.value)
    assert "hunter2" not in str(corpus.paths)
    for file in [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".from.json")]:
        assert b"hunter2" not in file.read_bytes()
