"""Damage anywhere in a cached file: found on reading, named, and repaired at the next start."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.data.datasets import open_datasets
from plimsoll.data.prepare import prepare
from plimsoll.errors import DataError
from plimsoll.files import checksums
from plimsoll.files.checksums import BLOCK_BYTES, SUMS_FILE, Damaged, blocks_of, checked, require_runs, require_whole
from plimsoll.files.store import read_facts, stored
from plimsoll.records.job import Job

NUM = 3 * BLOCK_BYTES // 2 + 5  # numbers of 2 bytes: three blocks and five numbers


def store(folder: Path) -> Path:
    def write(place: Path) -> dict[str, Any]:
        np.arange(NUM, dtype=np.uint16).tofile(place / "a.bin")
        (place / "small.bin").write_bytes(b"x" * BLOCK_BYTES)
        np.arange(NUM, dtype=np.uint16)[::-1].tofile(place / "z.bin")
        return {}

    stored(folder, write)
    return folder


def damage(path: Path, place: int) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.fixture(autouse=True)
def _another_process() -> Iterator[None]:
    yield
    checksums._require_file.cache_clear()


def test_what_is_whole_is_read_as_it_is(tmp_path: Path):
    numbers = checked(store(tmp_path / "store") / "z.bin", np.uint16)
    assert np.array_equal(numbers[:], np.arange(NUM, dtype=np.uint16)[::-1])
    require_whole(tmp_path / "store")


READS: dict[str, Any] = {
    "number": lambda numbers: numbers[BLOCK_BYTES],
    "from the end": lambda numbers: numbers[BLOCK_BYTES - NUM],
    "numbers": lambda numbers: numbers[np.array([[0, BLOCK_BYTES]])],
    "slice": lambda numbers: numbers[3 : BLOCK_BYTES + 1],
    "backwards": lambda numbers: numbers[:3:-1],
    "list": lambda numbers: numbers[[0, BLOCK_BYTES]],
    "are chosen": lambda numbers: numbers[np.ones(NUM, np.bool_)],
    "runs": lambda numbers: require_runs(numbers, np.array([0, 5]), np.array([2, BLOCK_BYTES + 1])),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_block_is_looked_at_when_it_is_read(tmp_path: Path, read):
    path = store(tmp_path / "store") / "z.bin"
    damage(path, 2 * BLOCK_BYTES + 1)
    numbers = checked(path, np.uint16)
    assert numbers[BLOCK_BYTES - 1] == NUM - BLOCK_BYTES  # this number lies in an undamaged block
    with pytest.raises(Damaged, match=r"z.bin is damaged: bytes 131,072 to 196,608 .* when you start again"):
        read(numbers)
    assert read_facts(path.parent) is None
    assert read_facts(store(path.parent)) == {}
    read(checked(path, np.uint16))


def test_a_whole_folder_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = store(tmp_path / "store")
    require_whole(folder)
    monkeypatch.setattr(checksums, "blocks_of", lambda path: pytest.fail(f"{path} was looked at"))
    require_whole(folder)


def test_stores_of_before_are_read_without(tmp_path: Path):
    folder = store(tmp_path / "store")
    (folder / SUMS_FILE).unlink()
    assert blocks_of(folder / "a.bin") is None
    assert checked(folder / "a.bin", np.uint16)[5] == 5


def test_small_files_have_no_sums(tmp_path: Path):
    stored(tmp_path / "store", lambda place: {"num": (place / "a").write_bytes(b"x" * BLOCK_BYTES)})
    assert not (tmp_path / "store" / SUMS_FILE).exists()


WORDS = [f"{stem}{end}" for stem in ("wind", "sea", "harbour", "plank", "rope") for end in ("", "s", "ing", "ed", "er")]


def text(number: int) -> str:
    drawn = random.Random(number)
    return " ".join(drawn.choices(WORDS, k=drawn.randint(4, 20))).capitalize() + "."


def files(folder: Path) -> None:
    texts = [text(number) for number in range(8_400)]
    (folder / "lines.txt").write_text("\n".join(texts))
    rows = [json.dumps({"text": one, "label": number % 3}) + "\n" for number, one in enumerate(texts)]
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("".join(rows).encode(), 1))
    (folder / "list.json").write_text("[" + ",".join(rows) + "]")
    words = ("".join(f"{word}\t{'AB'[len(word) % 2]}\n" for word in one.split()) + "\n" for one in texts)
    (folder / "words.conll").write_text("".join(words))


LABELLED: dict[str, Any] = {"task": "classification"}
JOBS: dict[str, dict[str, Any]] = {
    "windows": {"data": {"train": "lines.txt", "unit": "line", "validation": 0.1}},
    "packed": {"data": {"train": "lines.txt", "unit": "line", "pack": True}},
    "borders": {"data": {"train": "lines.txt", "unit": "line", "borders": "sentence"}},
    "texts": LABELLED | {"data": {"train": "rows.jsonl.gz", "label": "label"}},
    "on the fly": LABELLED
    | {"data": {"train": "list.json", "label": "label", "on_the_fly": True, "long_texts": "truncate"}},
    "tags": {"task": "token-classification", "data": {"train": "words.conll", "validation": 0.1}},
}


def samples(job: Job, cache: Path) -> tuple[str, list[list[int]]]:
    """Return the key and the samples of a training, as a new process would read them."""
    checksums._require_file.cache_clear()
    prepared = prepare(job, cache)
    read = []
    for part in open_datasets(prepared, job):
        if part is not None:
            for begin in range(0, len(part), 512):
                fields = part.batch(np.arange(begin, min(begin + 512, len(part))))
                read.append([int(field.sum()) for field in fields.values()])
    return prepared.key, read


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    files(folder)
    return folder


@pytest.mark.parametrize(
    "name", [name if name in {"windows", "texts"} else pytest.param(name, marks=pytest.mark.long) for name in JOBS]
)
def test_damage_anywhere_in_the_cache_of_a_job_is_found_and_mended(texts: Path, tmp_path: Path, name: str):
    fields = JOBS[name]
    data = fields["data"] | {"train": str(texts / fields["data"]["train"])}
    tokenizer = {"train": "words", "vocab_size": 60}
    job = Job.from_fields({"model": "gpt2", "sequence_length": 32, "tokenizer": tokenizer, **fields, "data": data})
    cache = tmp_path / "cache"
    whole = samples(job, cache)
    used = [path for path in sorted(cache.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    drawn, num_found = random.Random(name), 0
    for path in used:
        num_bytes = path.stat().st_size
        if not num_bytes:
            continue
        damage(path, num_bytes - 1 - drawn.randrange(min(num_bytes, BLOCK_BYTES // 2)))
        try:
            found, said = samples(job, cache), None
        except DataError as error:
            found, said = samples(job, cache), str(error)
        assert found == whole, path  # without an error, the file was not read or was written again
        assert said is None or str(path) in said
        num_found += said is not None
    assert num_found
