"""Opens a file of word vectors, whatever its format, and reads it part by part on all cores.

The formats are modules of `plimsoll.embeddings.formats`; the first that recognises the begin of the file reads it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats import (
    Block,
    Format,
    Rows,
    Vectors,
    fasttext_bin,
    gensim,
    glove,
    npy,
    table,
    word2vec_binary,
    word2vec_text,
)
from plimsoll.embeddings.formats._sources import Source
from plimsoll.errors import EmbeddingError

FORMATS: dict[str, ModuleType] = {
    "table": table,
    "npy": npy,
    "gensim": gensim,
    "fasttext_bin": fasttext_bin,
    "word2vec_binary": word2vec_binary,
    "word2vec_text": word2vec_text,
    "glove": glove,
}
"""In the order in which they are asked: what any text could be comes last."""

_MOST_THREADS = 8
_SHOWN_BYTES = 24

Result = TypeVar("Result")


class Opened(NamedTuple):
    """A file of word vectors, and its format."""

    source: Source
    format: str
    title: str
    vectors: Vectors


def open_file(path: Path) -> Opened:
    """Open a file of word vectors; ``path`` may name a file of a zip archive (``archive.zip/name``).

    Raises:
        EmbeddingError: if there is none, or it is of no known format.
    """
    return open_source(Source(path))


def open_source(source: Source) -> Opened:
    """Open what is in a file that was found.

    Raises:
        EmbeddingError: as `open_file`.
    """
    head = source.head
    if not head:
        raise EmbeddingError(f"{source.name} holds 0 bytes that can be read: download it again")
    for name, module in FORMATS.items():
        form: Format = module
        if form.recognises(head, source):
            return Opened(source, name, form.TITLE, form.open_vectors(source))
    titles = ", ".join(module.TITLE for module in FORMATS.values())
    raise EmbeddingError(
        f"{source.name} holds no word vectors that are known here (it begins with {head[:_SHOWN_BYTES]!r}): give "
        f"one of {titles}; .gz and .zip of these"
    )


def _forgotten(indexes: NDArray[np.int64]) -> Rows:
    raise AssertionError("the bytes of a part are gone once it has been read")


def read_parts(
    vectors: Vectors, wanted: Collection[bytes] | None, read: Callable[[Block], Result]
) -> Iterator[tuple[Block, Result]]:
    """Yield the parts of a file in its order, each with what ``read`` makes of it, in threads and some parts ahead.

    A part is only kept as its words and faults: ``rows`` of what is yielded is of no use.
    """
    num_threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)

    def work(part: Callable[[], Block]) -> tuple[Block, Result]:
        block = part()
        result = read(block)
        return block._replace(rows=_forgotten), result

    with ThreadPoolExecutor(num_threads) as threads:
        waiting: deque[Future[tuple[Block, Result]]] = deque()
        try:
            for part in vectors.parts(wanted):
                waiting.append(threads.submit(work, part))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)
