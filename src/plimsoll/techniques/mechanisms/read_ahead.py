"""Weights on disk that are in the page cache before they are needed: the next part is read while one computes.

    with reading_ahead(parts):
        model(**batch)

What is computed does not change: a page that is not there in time is read when it is touched.

Covers parts that are modules and whose forwards run in one order. Does NOT cover several threads that call one model,
and tables that are read by row: reading them whole would be no gain.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import nn

from plimsoll.device.cpu.pages import Stretch, bring, drop

_STACK_BYTES = 256 << 10  # a limit on private memory counts a thread's whole stack, by default 8 MiB


class StreamedPart(NamedTuple):
    """A part of a model that lies on disk; its stretches must stay mapped.

    ``following`` are stretches of weights that are used after it, such as an output layer that is no module of its own,
    since it is tied to the embeddings: they are read with the next part. The pages of a part that ``is_dropped`` cannot
    stay in memory.
    """

    module: nn.Module
    stretches: tuple[Stretch, ...]
    following: tuple[Stretch, ...] = ()
    is_dropped: bool = False


class Reader:
    """Brings and drops pages in a thread of its own, one request after the other."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[bool, tuple[Stretch, ...]] | None] = SimpleQueue()
        self._is_idle = threading.Condition()
        self._num_waiting = 0
        self._thread = _started_thread(self._work)

    def bring(self, stretches: tuple[Stretch, ...]) -> None:
        """Ask for pages."""
        self._ask(False, stretches)

    def drop(self, stretches: tuple[Stretch, ...]) -> None:
        """Give pages back."""
        self._ask(True, stretches)

    def wait(self) -> None:
        """Wait until all that was asked for is done."""
        with self._is_idle:
            self._is_idle.wait_for(lambda: not self._num_waiting)

    def close(self) -> None:
        """End the thread after what it does now."""
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
    """Read the pages of each part while the one before it computes, until the block ends.

    Args:
        parts: in the order in which they compute.
    """
    reader = Reader()
    with ExitStack() as stack:
        stack.callback(reader.close)
        for number, part in enumerate(parts):
            following = parts[(number + 1) % len(parts)]  # after the last the first, for the next pass
            before = parts[number - 1]
            turn = _Turn(reader, part, following, before)
            stack.callback(part.module.register_forward_pre_hook(turn.begin).remove)
            stack.callback(part.module.register_forward_hook(turn.end).remove)
        yield reader


class _Turn:
    """What is to be done when a part begins and when it ends."""

    def __init__(self, reader: Reader, part: StreamedPart, following: StreamedPart, before: StreamedPart) -> None:
        self._reader, self._part = reader, part
        is_only = following is part
        self._to_bring = part.following + (() if is_only else following.stretches)
        self._to_drop = before.following if before.is_dropped else ()

    def begin(self, *_: Any) -> None:
        """What the part before had to leave for after it goes; what is next comes."""
        self._reader.drop(self._to_drop)
        self._reader.bring(self._to_bring)

    def end(self, *_: Any) -> None:
        """Its own pages go, if they cannot stay.

        The kernel's own order, least recently used first, would drop each page of a cycle just before its next use,
        also those of parts that fit.
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
