"""Read-ahead for weights on disk: while one part of a model computes, the next part is read into the page cache.

    with reading_ahead(parts):
        model(**batch)

Results do not change: a page that is not in memory in time is read when it is accessed.

Parts are modules whose forwards run in a fixed order. Not handled: several threads that call one model, and embedding
tables, of which a pass reads only some rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import nn

from plimsoll.device.cpu.pages import Stretch, bring, drop

_STACK_BYTES = 256 << 10  # a limit on private memory counts a thread's whole stack, 8 MiB by default


class StreamedPart(NamedTuple):
    """A part of a model whose weights are mapped from files. The mappings must stay while it is used.

    Attributes:
        module: the module whose forward triggers the reading of the next part.
        stretches: the page ranges of its weights.
        following: the page ranges of weights that are used after this part but belong to no part's module, such as an
            output layer tied to the embeddings. They are read with the next part.
        is_dropped: whether its pages are dropped after use, because they cannot stay in memory.
    """

    module: nn.Module
    stretches: tuple[Stretch, ...]
    following: tuple[Stretch, ...] = ()
    is_dropped: bool = False


class Reader:
    """A thread that reads and drops pages, one request at a time."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[bool, tuple[Stretch, ...]] | None] = SimpleQueue()
        self._is_idle = threading.Condition()
        self._num_waiting = 0
        self._thread = _started_thread(self._work)

    def bring(self, stretches: tuple[Stretch, ...]) -> None:
        """Request that pages be read into memory; do not wait."""
        self._ask(False, stretches)

    def drop(self, stretches: tuple[Stretch, ...]) -> None:
        """Request that pages be dropped from memory; do not wait."""
        self._ask(True, stretches)

    def wait(self) -> None:
        """Wait until all requests are done."""
        with self._is_idle:
            self._is_idle.wait_for(lambda: not self._num_waiting)

    def close(self) -> None:
        """Discard waiting requests and end the thread after the current one."""
        while not self._requests.empty():
            self._requests.get()
        self._requests.put(None)
        self._thread.join()

    def _ask(self, is_drop: bool, stretches: tuple[Stretch, ...]) -> None:
        if stretches:
            with self._is_idle:
                self._num_waiting += 1
            self._requests.put((is_drop, stretches))

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            is_drop, stretches = request
            (drop if is_drop else bring)(stretches)
            with self._is_idle:
                self._num_waiting -= 1
                self._is_idle.notify_all()


@contextmanager
def reading_ahead(parts: Sequence[StreamedPart]) -> Iterator[Reader]:
    """Read the pages of each part while the previous one computes, until the block ends.

    Args:
        parts: the parts in execution order.
    """
    reader = Reader()
    with ExitStack() as stack:
        stack.callback(reader.close)
        for number, part in enumerate(parts):
            following = parts[(number + 1) % len(parts)]  # the first follows the last, for the next pass
            before = parts[number - 1]
            turn = _Turn(reader, part, following, before)
            stack.callback(part.module.register_forward_pre_hook(turn.begin).remove)
            stack.callback(part.module.register_forward_hook(turn.end).remove)
        yield reader


class _Turn:
    """The hooks that run before and after the forward of a part."""

    def __init__(self, reader: Reader, part: StreamedPart, following: StreamedPart, before: StreamedPart) -> None:
        self._reader, self._part = reader, part
        is_only = following is part
        self._to_bring = part.following + (() if is_only else following.stretches)
        self._to_drop = before.following if before.is_dropped else ()

    def begin(self, *_: Any) -> None:
        """Request this part's ``following`` pages and the pages of the next part.

        If the previous part is dropped after use, its ``following`` pages are dropped first.
        """
        self._reader.drop(self._to_drop)
        self._reader.bring(self._to_bring)

    def end(self, *_: Any) -> None:
        """Drop the part's pages if they cannot stay in memory.

        Otherwise the kernel would drop the least recently used pages. In repeated passes, these are the pages that are
        used next, even pages of parts that fit in memory.
        """
        if self._part.is_dropped:
            self._reader.drop(self._part.stretches)


def _started_thread(work: Any) -> threading.Thread:
    before_bytes = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="plimsoll-read-ahead", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before_bytes)
    return thread
