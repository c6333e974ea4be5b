"""Traces that do not depend on one another, made in forked processes while this one looks at others.

    with Tracers.started(job, texts) as tracers:
        tracers.expect(lowering, choices, is_short)     # begins one
        tracers.take(lowering, choices, is_short)       # waits for it

There are as many processes as cores in a command, and none in a program of one's own. They are forked before this
process computes, or there are none: a fork has none of the threads that torch has started, and would wait for them for
ever. What goes wrong in one of them, its death too, is no fault: the trace is made here, which says what is wrong.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress

from plimsoll.data.sketch import TextSketch
from plimsoll.forked import forked_pool
from plimsoll.memory.lowering.base import Lowering
from plimsoll.records.job import Job
from plimsoll.records.trace import Trace
from plimsoll.run.fork_server import can_fork
from plimsoll.run.imports import is_a_command
from plimsoll.run.remembered import trace_of
from plimsoll.techniques import Choices

_MOST_PROCESSES = 8  # a search asks for no more at once

_Asked = tuple[str, Choices, bool]


class Tracers:
    """Processes that trace a job; where there are none, nothing is expected and nothing can be taken."""

    def __init__(self, job: Job, texts: TextSketch, pool: ProcessPoolExecutor | None) -> None:
        self._job, self._texts, self._pool = job, texts, pool
        self._expected: dict[_Asked, Future[tuple[Trace, bool]]] = {}

    @classmethod
    @contextmanager
    def started(cls, job: Job, texts: TextSketch) -> Iterator[Tracers]:
        """Fork the processes, which end with the block."""
        num_processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        with ExitStack() as stack:
            with _uninterrupted():  # a program may have threads and what does not survive a fork
                is_forked = num_processes > 1 and is_a_command() and can_fork()
                pool = forked_pool(stack, num_processes, _begin) if is_forked else None
            yield cls(job, texts, pool)

    def expect(self, lowering: Lowering, choices: Choices, is_short: bool) -> None:
        """Begin a trace that will be taken."""
        asked = (lowering.name, choices, is_short)
        if self._pool is not None and asked not in self._expected:
            with suppress(BrokenProcessPool):
                arguments = (self._job, self._texts, lowering, choices, is_short)
                self._expected[asked] = self._pool.submit(_traced, *arguments)

    def take(self, lowering: Lowering, choices: Choices, is_short: bool) -> tuple[Trace, bool] | None:
        """Wait for a trace; returns it, and whether it was known before. ``None``: it has to be made here."""
        future = self._expected.pop((lowering.name, choices, is_short), None)
        return None if future is None or future.exception() is not None else future.result()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Have Ctrl-C wait for the block: what Python calls at a fork would raise it and ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Do nothing: a process of the pool has all it needs from the fork."""


def _traced(
    job: Job, texts: TextSketch, lowering: Lowering, choices: Choices, is_short: bool
) -> tuple[Trace, bool]:  # fmt: skip
    return trace_of(job, texts, lowering, choices, is_short=is_short)
