"""Worker processes that make traces in advance, in parallel with this process.

    with Tracers.started(job, texts) as tracers:
        tracers.expect(asked)       # will be taken in this order; workers trace the last one first
        tracers.suppose(asked)      # may be taken, likeliest first: begun by idle workers
        tracers.take(one)           # waits if it was begun, else returns None

A command has a worker for each core except one. A user's program has no workers. Workers are forked before this process
computes. A later fork would lack the threads that torch has started, and wait for them forever. If a worker fails or
dies, the trace is made in this process, which reports the error. At the end of the block, the workers are killed, so
that nobody waits for an unneeded trace.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.lowering.base import Lowering
from plimsoll.planning.cached_traces import trace_of
from plimsoll.planning.lean_imports import is_a_command
from plimsoll.processes.children import end_with, uninterrupted
from plimsoll.processes.fork_server import can_fork
from plimsoll.records.job import Job
from plimsoll.records.trace import Trace
from plimsoll.step.oom_boundary import without_fail
from plimsoll.techniques import Choices

_MOST_PROCESSES = 7  # a search requests no more at once

_Key = tuple[str, Choices, bool]


class Asked(NamedTuple):
    """A requested trace: arguments of `plimsoll.planning.cached_traces.trace_of`."""

    lowering: Lowering
    choices: Choices
    is_short: bool

    @property
    def key(self) -> _Key:
        """The key that identifies the trace."""
        return self.lowering.name, self.choices, self.is_short


class _Worker(NamedTuple):
    process: ForkProcess
    connection: Connection


class Tracers:
    """Worker processes that make traces of a job in advance. Without workers, `take` always returns ``None``."""

    def __init__(self, workers: Sequence[_Worker] = ()) -> None:
        self._workers, self._is_over, self._changed = workers, False, Condition()
        self._expected: list[Asked] = []
        self._supposed: list[Asked] = []
        self._begun: dict[_Key, Future[bytes | None]] = {}
        self._threads = [Thread(target=self._feed, args=(one.connection,), daemon=True) for one in workers]

    @property
    def number(self) -> int:
        """The number of workers for which a core is free, given the load of other programs."""
        num_working = sum(not future.done() for future in tuple(self._begun.values()))
        num_others = max(_num_running() - 1 - num_working, 0)
        return min(len(self._workers), max(len(os.sched_getaffinity(0)) - 1 - num_others, 0))

    @classmethod
    @contextmanager
    def started(cls, job: Job, texts: TextSketch) -> Iterator[Tracers]:
        """Fork the workers, which are killed when the block ends."""
        number = min(len(os.sched_getaffinity(0)) - 1, _MOST_PROCESSES)
        with ExitStack() as stack:
            with uninterrupted():
                # A user's program may have threads and state that do not survive a fork.
                may_fork = number > 0 and is_a_command() and not current_process().daemon and can_fork()
                tracers = cls(tuple(_forked(number, job, texts)) if may_fork else ())
                stack.callback(tracers._end)
                for thread in tracers._threads:
                    thread.start()
            yield tracers

    def expect(self, asked: Sequence[Asked]) -> None:
        """Begin traces that will be taken in this order."""
        self._ask(self._expected, asked)

    def suppose(self, asked: Iterable[Asked]) -> None:
        """Begin traces that may be taken, if no expected trace is waiting and cores are idle."""
        self._ask(self._supposed, list(islice(asked, self.number)))

    def take(self, asked: Asked) -> tuple[Trace, bool] | None:
        """Wait for a trace that a worker has started. Return it, and whether it was cached.

        Return ``None`` if no worker has started it, or the worker failed. The caller then makes the trace.
        """
        with self._changed:
            for waiting in (self._expected, self._supposed):
                waiting[:] = [one for one in waiting if one.key != asked.key]
            future = self._begun.pop(asked.key, None)
        content = None if future is None else future.result()
        return None if content is None else pickle.loads(content)

    def _ask(self, waiting: list[Asked], asked: Sequence[Asked]) -> None:
        with self._changed:
            self._supposed.clear()  # earlier suppositions that are not begun are outdated
            known = {*self._begun, *(one.key for one in self._expected)}
            new = {one.key: one for one in asked if one.key not in known}
            waiting += new.values() if self._workers else ()
            self._changed.notify_all()

    def _feed(self, connection: Connection) -> None:
        """Send requests to a worker until it dies or the block ends."""
        while (begun := self._begin()) is not None:
            asked, future = begun
            content = None
            try:
                connection.send(asked)
                content = connection.recv_bytes() or None
            except (EOFError, OSError):  # it was killed
                return
            finally:
                future.set_result(content)

    def _begin(self) -> tuple[Asked, Future[bytes | None]] | None:
        """Wait for a request. Return it and the future of its trace, or ``None`` when the block ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._expected or self._supposed)
            if self._is_over:
                return None
            asked = self._expected.pop() if self._expected else self._supposed.pop(0)
            future = self._begun[asked.key] = Future()
            return asked, future

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.connection.close()


def _num_running() -> int:
    """Return the number of threads on this machine that run or wait for a core.

    Read from /proc/loadavg; 1 if it cannot be read.
    """
    with suppress(OSError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return 1


def _forked(number: int, job: Job, texts: TextSketch) -> Iterator[_Worker]:
    """Fork up to ``number`` processes."""
    context = get_context("fork")
    for _ in range(number):
        here, there = context.Pipe()
        process = context.Process(target=_trace_as_asked, args=(there, job, texts, os.getpid()), daemon=True)
        with there, suppress(OSError):  # the process limit is reached
            process.start()
            yield _Worker(process, here)


def _trace_as_asked(connection: Connection, job: Job, texts: TextSketch, parent: int) -> None:
    """Make requested traces and send them. If a trace fails, send an empty message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the parent, which ends this process
    end_with(parent)
    with suppress(EOFError):
        while True:
            lowering, choices, is_short = connection.recv()
            made = without_fail(partial(trace_of, job, texts, lowering, choices, is_short=is_short))
            connection.send_bytes(b"" if isinstance(made, str) else pickle.dumps(made))
