"""What every data format must do, for each module of `plimsoll.data.formats`: a new one is tested before it is used."""

import os
import pickle
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.data import formats
from plimsoll.data.index import Corpus, open_corpus
from plimsoll.errors import DataError

FORMATS = [module.name for module in pkgutil.iter_modules(formats.__path__) if not module.name.startswith("_")]

# How each format writes texts into a folder; a format is added here with its module.
Writer = Callable[[Path, list[str]], None]


def write_text(folder: Path, texts: list[str]) -> None:
    """One line for each text, half of them in each of two files."""
    half = len(texts) // 2
    (folder / "1.txt").write_text("\n".join(texts[:half]))
    (folder / "2.txt").write_text("".join(f"{text}\n" for text in texts[half:]))


WRITERS: dict[str, Writer] = {"text": write_text}

TEXTS = [
    "one",
    "two \u2028 lines\x0c?",
    "\u00e9t\u00e9 \U0001f600",
    " spaces kept ",
    "x" * 300_000,
    '{"a": "b,c"}',
    "last",
]


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    WRITERS[request.param](folder, TEXTS)
    return folder


def opened(folder: Path) -> Corpus:
    return open_corpus((str(folder),), "line", folder.parent / "cache")


def index_of(folder: Path) -> Path:
    (index,) = (path for path in (folder.parent / "cache").glob("index-*") if path.is_dir())
    return index


def test_every_format_has_a_writer_here():
    assert set(FORMATS) == set(WRITERS)


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
    WRITERS[request.node.callspec.params["folder"]](folder, TEXTS[::-1])
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))  # an older file put in place is another file too
    assert list(opened(folder)) == TEXTS[::-1]


@pytest.mark.parametrize("tear", ["shorter", "changed", "gone"])
def test_a_torn_index_is_built_again(folder: Path, tear: str):
    opened(folder)
    for path in index_of(folder).iterdir():
        content = path.read_bytes()
        if tear == "gone":
            path.unlink()
        else:
            path.write_bytes(content[:-1] if tear == "shorter" else bytes([content[0] ^ 1]) + content[1:])
        assert list(opened(folder)) == TEXTS


def test_a_corpus_survives_pickling(folder: Path):
    assert list(pickle.loads(pickle.dumps(opened(folder)))) == TEXTS


def test_bytes_that_are_not_utf8_are_an_error_where_the_file_is_named(folder: Path):
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b"two", b"\xff\xff\xff"))
    with pytest.raises(DataError, match=rf"{path.name} .*byte \d+ \(0xff\) is not UTF-8.*iconv"):
        open_corpus((str(path),), "line", folder.parent / "cache")
    assert len(opened(folder).skipped) == 1


def test_a_source_without_text_is_an_error(folder: Path):
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="hold nothing but white space"):
        opened(folder)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="there is no file or folder"):
        opened(folder)
