"""Handmade files of word vectors and their contents, for the tests of the formats."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from plimsoll.embeddings.formats import Fault, Vectors
from plimsoll.embeddings.formats.helpers.sources import Source

RECORDED = Path(__file__).parent / "unit" / "embeddings" / "formats" / "recorded"


class Read(NamedTuple):
    """The complete contents of a file."""

    words: list[bytes]
    matrix: np.ndarray
    faults: list[Fault]
    num_words: int


def written(path: Path, raw: bytes, packing: str = "") -> Path:
    """Write a file, or a gzip or zip file of it."""
    if packing == "gzip":
        path = path.with_name(f"{path.name}.gz")
        raw = gzip.compress(raw, mtime=0)
    elif packing == "zip":
        path = path.with_suffix(".zip")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("vectors", raw)
        return path
    path.write_bytes(raw)
    return path


def opened(module: ModuleType, path: Path) -> Vectors:
    """Open a file that the format recognises."""
    source = Source(path)
    assert module.recognises(source.head, source)
    return module.open_vectors(source)


def read_all(vectors: Vectors, wanted: Collection[bytes] | None = None) -> Read:
    """Read all words, or the wanted ones, and check the properties that every format promises."""
    words, rows, faults, num_words, shares = [], [np.empty((0, vectors.dimension), np.float32)], [], 0, [0.0]
    for part in vectors.parts(wanted):
        block = part()
        shares.append(vectors.share_read())
        assert len(block.words) == len(block.places) <= block.num_words
        assert (np.diff(block.places) > 0).all()
        assert not len(block.places) or (block.places[0] >= 0 and block.places[-1] < block.num_words)
        read = block.rows(np.arange(len(block.words)))
        if block.words:
            assert read.matrix.dtype == np.float32
            assert read.matrix.shape == (len(block.words), vectors.dimension)
            assert (block.rows(np.array([len(block.words) - 1])).matrix.tobytes()) == read.matrix[-1:].tobytes()
            rows.append(read.matrix)
        words += block.words
        faults += [*block.faults, *read.faults]
        num_words += block.num_words
    assert shares == sorted(shares)
    assert vectors.share_read() == 1.0
    return Read(words, np.concatenate(rows), faults, num_words)


def expected(name: str) -> tuple[list[bytes], np.ndarray]:
    """Return the words of a recorded file, and their vectors according to its own library."""
    with np.load(RECORDED / "expected.npz") as arrays:
        return [word.encode() for word in arrays[f"{name}:words"]], arrays[f"{name}:vectors"]


def expected_unknown(name: str) -> tuple[list[bytes], np.ndarray]:
    """Return words that may be absent from a recorded file, and their vectors according to its own library."""
    with np.load(RECORDED / "expected.npz") as arrays:
        return [word.encode() for word in arrays["unknown"]], arrays[f"{name}:unknown"]
