"""Texts for tests of corpora; they are opened in small parts, so that borders fall everywhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from plimsoll.data.formats import Reading, text
from plimsoll.data.formats.helpers import scanning
from plimsoll.data.text import scan
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus


def opened(source: Path, reading: Reading | None = None, **fields: object) -> Corpus:
    """Index a file or folder without a cache; ``fields`` belong to `Reading`, if none is given (a line is a text)."""
    cache = source.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    return open_corpus((str(source),), reading or Reading(**{"unit": "line", **fields}), cache)


def written(path: Path, content: bytes | str) -> Path:
    """Write a file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def cut_into(part_bytes: int, chunk_bytes: int) -> Iterator[None]:
    """Scan files in parts and chunks of these sizes (multiples of 8); NUL in the first 4 bytes marks binary files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "PART_BYTES", part_bytes)
        patch.setattr(scanning, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(scanning, "_PROBE_BYTES", 4)
        patch.setattr(text, "_FEW", 0)  # all lines at once, even if they are few
        yield


def check_all_ways(corpus: Corpus, texts: list[str], ids: list[int]) -> None:
    """Check that every way to read a corpus gives the same texts."""
    numbers = np.array(ids, np.int64) % len(texts)
    assert list(corpus) == texts
    assert [corpus[number] for number in range(len(corpus))] == texts
    assert corpus.texts(np.arange(len(corpus))) == texts
    assert corpus.texts(numbers) == [texts[number] for number in numbers]
    assert corpus.with_blocks(1 << 20).texts(numbers) == [texts[number] for number in numbers]
    assert "".join(piece for piece, _ in corpus.pieces()) == "".join(texts)
    assert sum(is_last for _, is_last in corpus.pieces()) == len(texts)
    assert "".join(corpus.sample(1 << 30)) == "".join(texts)
    assert corpus.byte_lengths(np.arange(len(corpus))).sum() == corpus.num_bytes
