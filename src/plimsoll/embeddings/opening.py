"""Opening of files of word vectors in any format, and reading of their parts on all cores.

Each format is a module of `plimsoll.embeddings.formats`. The first module that recognises the start of a file reads it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

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
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.errors import EmbeddingError, JobError
from plimsoll.processes.children import forked_pool
from plimsoll.records.embeddings import VectorSource

FORMATS: dict[str, ModuleType] = {
    "table": table,
    "npy": npy,
    "gensim": gensim,
    "fasttext_bin": fasttext_bin,
    "word2vec_binary": word2vec_binary,
    "word2vec_text": word2vec_text,
    "glove": glove,
}
"""The formats in the order in which they are tried. The least specific text format is last."""

_MOST_WORKERS = 8
_FORKED_PARTS = 32  # with fewer parts, starting processes takes longer than it saves
_PARTS_PER_TASK = 8
_SHOWN_BYTES = 24

Result = TypeVar("Result")


class Opened(NamedTuple):
    """An open file of word vectors, and its format: the key in `FORMATS`, and the title for messages."""

    source: Source
    format: str
    title: str
    vectors: Vectors


def open_file(path: Path) -> Opened:
    """Open a file of word vectors. ``path`` can name a file in a zip archive (``archive.zip/name``).

    Raises:
        EmbeddingError: if the file does not exist, or has no known format.
    """
    return open_source(Source(path))


def open_source(source: Source) -> Opened:
    """Open the word vectors of a source.

    Raises:
        EmbeddingError: if the source is empty, or has no known format.
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
        f"{source.name} is not in a known format of word vectors (it begins with {head[:_SHOWN_BYTES]!r}): give "
        f"one of {titles}; .gz and .zip of these"
    )


def read_parts(
    vectors: Vectors, wanted: Collection[bytes] | None, read: Callable[[Block], Result]
) -> Iterator[tuple[Block, Result, float]]:
    """Yield the parts of a file in order, each with the result of ``read`` and the share (0 to 1) of the file read.

    Parts are read ahead on up to eight cores: by forked processes if the format splits the file into enough parts,
    otherwise by threads. The vectors of a yielded part have been freed: do not call its ``rows``.

    Args:
        vectors: the open file.
        wanted: the words whose vectors are needed; ``None``: all words.
        read: function that is called with each part, in any thread or process.
    """

    def work(part: Callable[[], Block]) -> tuple[Block, Result]:
        block = part()
        result = read(block)
        return block._replace(rows=_forgotten), result

    number = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    with ExitStack() as stack:
        if vectors.num_parts >= _FORKED_PARTS and number > 1:
            parts = list(vectors.parts(wanted))
            pool = forked_pool(stack, number, _begin, parts, work)
            if pool is not None:
                yield from _of_processes(pool, parts, work, number)
                return
        yield from _of_threads(stack, vectors, wanted, work, number)


Work = Callable[[Callable[[], Block]], tuple[Block, Result]]
_INHERITED: dict[str, Any] = {}
"""State of a forked process: the parts of the file (``parts``), and the function to call with each (``work``)."""


def _begin(parts: list[Callable[[], Block]], work: Work[Any]) -> None:
    _INHERITED.update(parts=parts, work=work)


def _do(begin: int, end: int) -> list[tuple[Block, Any]]:
    return [_INHERITED["work"](part) for part in _INHERITED["parts"][begin:end]]


def _of_processes(
    pool: ProcessPoolExecutor, parts: list[Callable[[], Block]], work: Work[Result], number: int
) -> Iterator[tuple[Block, Result, float]]:
    tasks = [(begin, min(begin + _PARTS_PER_TASK, len(parts))) for begin in range(0, len(parts), _PARTS_PER_TASK)]
    waiting: deque[tuple[int, int, Future[list[tuple[Block, Result]]] | None]] = deque()
    while tasks or waiting:
        while tasks and len(waiting) < number + 2:
            waiting.append((*tasks[0], _submitted(pool, *tasks.pop(0))))
        begin, end, future = waiting.popleft()
        try:
            done = [work(part) for part in parts[begin:end]] if future is None else future.result()
        except BrokenProcessPool:  # a process was killed, so this process reads the parts
            done = [work(part) for part in parts[begin:end]]
        for place, (block, result) in enumerate(done, begin + 1):
            yield block, result, place / len(parts)


def _submitted(pool: ProcessPoolExecutor, begin: int, end: int) -> Future[Any] | None:
    try:
        return pool.submit(_do, begin, end)
    except BrokenProcessPool:
        return None


def _of_threads(
    stack: ExitStack, vectors: Vectors, wanted: Collection[bytes] | None, work: Work[Result], number: int
) -> Iterator[tuple[Block, Result, float]]:
    threads = stack.enter_context(ThreadPoolExecutor(number))
    stack.callback(threads.shutdown, cancel_futures=True)
    waiting: deque[Future[tuple[Block, Result]]] = deque()
    for part in vectors.parts(wanted):
        waiting.append(threads.submit(work, part))
        if len(waiting) > 2 * number:
            yield *waiting.popleft().result(), vectors.share_read()
    while waiting:
        yield *waiting.popleft().result(), vectors.share_read()


def _forgotten(indexes: NDArray[np.int64]) -> Rows:
    raise AssertionError("the bytes of a part are freed once it has been read")


def dimension_of(source: VectorSource) -> int:
    """Return the number of values per vector in the file of a job's ``embeddings``.

    Raises:
        JobError: if the file cannot be used.
    """
    path = Path(source.path)
    try:
        return _dimension(path, path.stat().st_mtime_ns if path.exists() else 0)
    except EmbeddingError as error:
        raise JobError(f"embeddings: {error}") from None


@lru_cache(maxsize=8)
def _dimension(path: Path, mtime_ns: int) -> int:
    return open_file(path).vectors.dimension
