"""Inspection of a file of word vectors: every word and number is read, and only counts are kept.

Takes about 100 bytes of memory per word, to detect duplicates.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.faults import FaultList
from plimsoll.embeddings.formats import Block, Rows
from plimsoll.embeddings.opening import open_file, read_parts
from plimsoll.files.store import Progress, silent
from plimsoll.records.embeddings import VectorFile

_SHOWN_WORDS = 8


def every_row(block: Block) -> tuple[NDArray[np.int64], Rows]:
    """Parse all vectors in a part of a file. Return the indexes of their words in ``block.words``, and the vectors."""
    indexes = np.arange(len(block.words))
    return indexes, block.rows(indexes)


def first_usable(block: Block, rows: Rows, seen: set[bytes], faults: FaultList) -> list[int]:
    """Return the indexes of the words in ``block`` that have a valid vector and are not in ``seen``.

    These words are added to ``seen``. Words with a valid vector that are in ``seen`` are added to ``faults`` as
    repeated words. All code that counts the words of a file uses this function.
    """
    wrong, kept = {fault.at for fault in rows.faults}, []
    for index, word in enumerate(block.words):
        if index in wrong:
            continue
        if word in seen:
            faults.add_again([word])
            continue
        seen.add(word)
        kept.append(index)
    return kept


def look_at(path: str | Path, strict: bool = False, progress: Progress = silent) -> VectorFile:
    """Read a whole file of word vectors and return facts about it.

    Args:
        path: the file, in any of the formats of `plimsoll.embeddings.formats`.
        strict: whether the first fault raises an error; otherwise faults are counted.
        progress: called with the stage ``"vectors"``.

    Raises:
        EmbeddingError: if the file cannot be read, has no known format, or, with ``strict``, has a fault.
    """
    start_seconds = time.perf_counter()
    opened = open_file(Path(path))
    faults = FaultList(opened, strict)
    seen: set[bytes] = set()
    first_words: list[bytes] = []
    lengths = [np.empty(0)]
    for block, (indexes, rows), share in read_parts(opened.vectors, None, every_row):
        faults.add(block, indexes, rows)
        kept = first_usable(block, rows, seen, faults)
        usable = rows.matrix[kept]
        lengths.append(np.sqrt(np.einsum("ij,ij->i", usable, usable, dtype=np.float64)))
        first_words += [block.words[index] for index in kept[: max(_SHOWN_WORDS - len(first_words), 0)]]
        progress("vectors", round(share * 1000), 1000)
    faults.end()
    norms = np.concatenate(lengths)
    return VectorFile(
        path=opened.source.name,
        format=opened.title,
        num_file_bytes=opened.source.num_file_bytes,
        dimension=opened.vectors.dimension,
        num_words=len(seen),
        num_entries=faults.num_entries,
        num_promised=opened.vectors.num_promised,
        num_duplicates=faults.num_duplicates,
        faults=faults.counts(),
        first_words=tuple(word.decode("utf-8", "replace") for word in first_words),
        norms=(float(norms.min()), float(np.median(norms)), float(norms.max())) if len(norms) else None,
        seconds=time.perf_counter() - start_seconds,
    )
