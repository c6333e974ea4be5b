"""The contract of data formats, for each module of `plimsoll.data.formats`: a new format is tested automatically."""

import csv
import gzip
import json
import os
import pickle
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from plimsoll.data import formats
from plimsoll.data.formats import Reading
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError

MODULES = [module.name for module in pkgutil.iter_modules(formats.__path__) if not module.ispkg]

# How each format writes texts into a file. Add a format here together with its module.
Writer = Callable[[Path, list[str]], None]


def write_text(path: Path, texts: list[str]) -> None:
    path.write_bytes("\n".join(texts).encode())


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_bytes("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode())


def write_csv(path: Path, texts: list[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["text"], *([text] for text in texts)])


def write_parquet(path: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, compression="none", use_dictionary=False)


def write_arrow(path: Path, texts: list[str]) -> None:
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def write_gzip(path: Path, texts: list[str]) -> None:
    write_jsonl(path, texts)
    path.write_bytes(gzip.compress(path.read_bytes(), 0))


def write_tokens(path: Path, texts: list[str]) -> None:
    """Write texts of one word with a tag."""
    rows = [{"tokens": [text], "tags": ["O" if number % 2 else "B-X"]} for number, text in enumerate(texts)]
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def write_conll(path: Path, texts: list[str]) -> None:
    path.write_bytes("\n".join(f"{text}\tO\n" for text in texts).encode())


WRITERS: dict[str, tuple[str, Writer]] = {
    "text": (".txt", write_text),
    "jsonl": (".jsonl", write_jsonl),
    "csv": (".csv", write_csv),
    "packed": (".parquet", write_parquet),
    "packed from Arrow": (".arrow", write_arrow),
    "jsonl in gzip": (".jsonl.gz", write_gzip),
    "tagged": (".tokens.jsonl", write_tokens),
    "tagged in CoNLL": (".conll", write_conll),
}
TAGGED = tuple(suffix for name, (suffix, _) in WRITERS.items() if name.startswith("tagged"))


def write_half_each(name: str, folder: Path, texts: list[str]) -> None:
    """Write half of the texts into each of two files."""
    suffix, write = WRITERS[name]
    half = len(texts) // 2
    write(folder / f"1{suffix}", texts[:half])
    write(folder / f"2{suffix}", texts[half:])


TEXTS = [
    "one",
    "two \u2028 lines\x0c?",
    "\u00e9t\u00e9 \U0001f600",
    " spaces kept ",
    "x" * 300_000,
    '{"a": "b,c"}',
    "last",
]


@pytest.fixture(params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_half_each(request.param, folder, TEXTS)
    return folder


def opened(folder: Path, source: Path | None = None, on_error: Literal["stop", "skip"] = "stop") -> Corpus:
    source = source or folder
    is_tagged = any(path.name.endswith(TAGGED) for path in folder.glob("*"))
    reading = Reading(unit="line", on_error=on_error, is_tagged=is_tagged)
    return open_corpus((str(source),), reading, folder.parent / "cache")


def index_of(folder: Path) -> Path:
    (index,) = (path for path in (folder.parent / "cache").glob("index-*") if path.is_dir())
    return index


def test_every_format_has_a_writer_here():
    assert set(MODULES) <= set(WRITERS)


def test_random_access_is_sequential_access(folder: Path):
    corpus = opened(folder)
    assert list(corpus) == TEXTS
    backwards = [corpus[number] for number in reversed(range(len(corpus)))]
    assert backwards == TEXTS[::-1]
    pieces = "".join(piece for piece, _ in corpus.pieces())
    assert pieces == "".join(TEXTS)
    assert sum(is_last for _, is_last in corpus.pieces()) == len(corpus)


def test_the_index_survives_being_opened_again(folder: Path):
    key = opened(folder).key
    written = (index_of(folder) / "manifest.json").stat().st_mtime_ns
    again = opened(folder)
    assert (again.key, list(again)) == (key, TEXTS)
    assert (index_of(folder) / "manifest.json").stat().st_mtime_ns == written


def test_a_stale_index_is_not_used(folder: Path, request: pytest.FixtureRequest):
    opened(folder)
    write_half_each(request.node.callspec.params["folder"], folder, TEXTS[::-1])
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))  # an older file in its place is a different file, too
    assert list(opened(folder)) == TEXTS[::-1]


@pytest.mark.parametrize("tear", ["shorter", "changed", "gone"])
def test_a_torn_index_is_built_again(folder: Path, tear: str):
    opened(folder)
    for path in index_of(folder).iterdir():
        content = path.read_bytes()
        if tear == "gone":
            path.unlink()
        else:
            path.write_bytes(content[:-1] if tear == "shorter" else bytes([*content[:1], 0][:1]) + b"?" + content[2:])
        assert list(opened(folder)) == TEXTS


def test_a_corpus_survives_pickling(folder: Path):
    assert list(pickle.loads(pickle.dumps(opened(folder)))) == TEXTS


def test_a_torn_conversion_is_made_again(folder: Path):
    opened(folder)
    for store in (folder.parent / "cache").iterdir():
        if store.is_dir() and not store.name.startswith("index-"):
            for path in store.iterdir():
                path.write_bytes(path.read_bytes()[:-1])
    assert list(opened(folder)) == TEXTS


def test_bytes_that_are_not_utf8_are_an_error_where_the_file_is_named(folder: Path):
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b"two", b"\xff\xff\xff"))
    with pytest.raises(DataError, match=rf"cannot \w+ .*{path.name}"):
        opened(folder, path)


def test_rows_that_are_not_utf8_are_skipped_where_that_was_asked(folder: Path, request: pytest.FixtureRequest):
    if "gzip" in request.node.callspec.params["folder"]:
        pytest.skip("the checksum of the archive finds the change first")
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b"two", b"\xff\xff\xff"))
    corpus = opened(folder, on_error="skip")
    assert list(corpus) == [TEXTS[0], *TEXTS[2:]]
    assert (corpus.num_skipped, len(corpus.skipped)) == (1, 1)


def test_a_source_without_text_is_an_error(folder: Path):
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="hold nothing but white space"):
        opened(folder)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="there is no file or folder"):
        opened(folder)
