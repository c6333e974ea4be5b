"""Batches that worker processes read ahead, in order. If a worker dies, no sample is lost or repeated.

The worker processes, their queues and their check that the parent process is alive come from
`torch.utils.data.DataLoader`. If a worker is killed, crashes or fails, all workers are ended. Reading continues at the
cursor with half as many workers, and finally in this process. A crash of the last worker is raised as `KilledError`,
because this process would crash too. The number of workers stays reduced for the lifetime of the `Feed`. An error that
also occurs without workers, such as damaged data, is raised unchanged.

Batches that are read ahead are in shared memory: (workers x prefetch + 1) x bytes per batch, exact in 12 of 12 measured
cases. This process does not read the data set before the workers are forked. So a file that is opened at the first read
is not shared between workers. Not handled: start methods other than fork, with which each worker imports torch (226
MiB).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from plimsoll.data.batches.batching import Cursor
from plimsoll.errors import KilledError, PlimsollError
from plimsoll.processes.children import end_with
from plimsoll.records.units import format_bytes

_SHARED_MEMORY = "/dev/shm"
_WORKER_BYTES = 12 << 20  # the memory of a forked worker, without batches; measured with torch 2.13
_FAILURES = (RuntimeError, OSError, EOFError, MemoryError)  # a process or its connection fails, or memory runs out
_CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_NO_SPACE = os.strerror(errno.ENOSPC)
_KEYS = count()  # torch accepts each key only once
_SECONDS_TO_DIE = 1.0  # a connection breaks shortly before its process ends

Task = tuple[int, NDArray[np.int64]]  # an epoch and the indices of samples


class Places(Protocol):
    """The sequence of batches to read, addressed by cursors."""

    def task(self, cursor: Cursor) -> Task:
        """Return the task at a cursor: the epoch and the indices of the samples to read."""
        ...

    def following(self, cursor: Cursor) -> Cursor:
        """Return the cursor of the batch after the one at ``cursor``."""
        ...


Read = Callable[[Task], dict[str, Any]]


class Feed:
    """A reader that returns the batch at a cursor. This process reads it, or worker processes read it ahead of time.

    Args:
        read: a function that reads the samples of a task and returns their fields. The workers call it, if there are
            any.
        places: the batches to read.
        workers: the number of processes. ``"auto"`` depends on cores and ``budget_bytes``, and is 0 if ``reads_fast``.
        prefetch: the number of batches that each worker reads ahead.
        reads_fast: whether reading takes no longer than the transfer from a worker.
        budget_bytes: the memory limit for all ``"auto"`` workers and their batches, in bytes; ``None`` for no limit. A
            given number of workers is not limited.
        on_event: called with a sentence for each failure that was handled.
        oom_kills: a function that returns how many processes the kernel has killed so far because memory ran out;
            ``None`` if unknown.
    """

    def __init__(
        self,
        read: Read,
        places: Places,
        workers: int | Literal["auto"],
        prefetch: int,
        *,
        reads_fast: bool,
        budget_bytes: int | None,
        on_event: Callable[[str], None],
        oom_kills: Callable[[], int | None],
    ) -> None:
        self._read, self._places = read, places
        self._on_event, self._oom_kills = on_event, oom_kills
        self._budget_bytes = budget_bytes
        self._is_auto = workers == "auto"
        wanted = (0 if reads_fast else _spare_cores()) if workers == "auto" else workers
        self._num_workers, self._prefetch = wanted, prefetch
        self._batch_bytes: int | None = None
        self._ahead: _Ahead | None = None
        self._kills: int | None = None  # `oom_kills` before these workers started

    @property
    def num_workers(self) -> int:
        """The number of worker processes, or the number that will start with the first batch."""
        return self._num_workers

    def fields(self, cursor: Cursor) -> dict[str, Any]:
        """Return the batch at a cursor. Workers then read ahead the batches at the following cursors.

        Raises:
            KilledError: if reading crashes the last worker.
        """
        while self._num_workers:
            try:
                return self._read_ahead(cursor)
            except _FAILURES as error:
                said = (str(error).splitlines() or [type(error).__name__])[-1]  # the first lines are a traceback
            self._go_on_with_fewer(said)  # not in the except block, where the error keeps frames and batches alive
        return self._read(self._places.task(cursor))

    def close(self) -> None:
        """End the workers. The next requested batch starts them again."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _read_ahead(self, cursor: Cursor) -> dict[str, Any]:
        if self._ahead is not None and self._ahead.cursor != cursor:
            self.close()
        is_first = self._batch_bytes is None  # one worker reads this batch, and its size limits the number of workers
        if self._ahead is None:
            self._ahead = self._begin(cursor, *((1, 1) if is_first else (self._num_workers, self._prefetch)))
        fields = self._ahead.take()
        if is_first:
            self._batch_bytes = sum(field.nbytes for field in fields.values() if isinstance(field, torch.Tensor))
            self.close()
            self._fit()
            if self._num_workers:
                self._ahead = self._begin(self._places.following(cursor), self._num_workers, self._prefetch)
        return fields

    def _begin(self, cursor: Cursor, num_workers: int, prefetch: int) -> _Ahead:
        self._kills = self._oom_kills()
        return _Ahead(self._read, self._places, cursor, num_workers, prefetch)

    def _fit(self) -> None:
        """Reduce the numbers of workers and of prefetched batches to fit the memory limit and /dev/shm."""
        batch_bytes = max(self._batch_bytes or 0, 1)
        if self._is_auto and self._budget_bytes is not None:
            of_one = _WORKER_BYTES + (self._prefetch + 1) * batch_bytes
            self._num_workers = min(self._num_workers, self._budget_bytes // of_one)
        free_bytes = shared_memory_free_bytes()
        need_bytes = self._num_workers * self._prefetch * batch_bytes  # without the first batch, which exists already
        if free_bytes is None or need_bytes <= free_bytes:
            return
        most_batches = free_bytes // batch_bytes
        asked = f"{self._num_workers} workers that read {self._prefetch} batches ahead"
        self._num_workers = min(self._num_workers, most_batches)
        self._prefetch = min(self._prefetch, most_batches // max(self._num_workers, 1)) or 1
        self._on_event(
            f"{_SHARED_MEMORY} has {format_bytes(free_bytes)} free, but {asked} need {format_bytes(need_bytes)} of it "
            f"({format_bytes(batch_bytes)} a batch): continuing with {_workers(self._num_workers)} that read "
            f"{self._prefetch} ahead (in a container, --shm-size gives more)"
        )

    def _go_on_with_fewer(self, said: str) -> None:
        deaths = self._ahead.deaths() if self._ahead is not None else []  # no `_ahead`: workers could not be forked
        self.close()
        causes = [self._cause_of_death(pid, code) for pid, code in deaths] or [said]
        cause = "; ".join(causes) + (self._shared_memory() if _NO_SPACE in said else "")
        crash = next((-code for _, code in deaths if -code in _CRASHES), None)
        if crash and self._num_workers == 1:  # for example a bus error if a memory-mapped file has become shorter
            raise KilledError(
                f"the worker that reads the data crashed: {cause}; the data is not read in this process, which would "
                f"crash too: check that no file of the data has become shorter, or see where it crashes with workers=0",
                crash,
            )
        asked, self._num_workers = self._num_workers, self._num_workers // 2
        self._on_event(
            f"reading with {_workers(asked)} failed: {cause}. Continuing at the same batch with "
            f"{_workers(self._num_workers)}: no sample is lost or repeated"
        )

    def _cause_of_death(self, pid: int, exit_code: int) -> str:
        if exit_code >= 0:
            return f"worker {pid} ended with exit code {exit_code}"
        number = -exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number == signal.SIGKILL:
            kills = self._oom_kills()
            if kills is None or self._kills is None:
                return f"worker {pid} was killed ({name}), by the kernel for lack of memory or by a user"
            of_memory = "" if kills > self._kills else "not "
            return f"worker {pid} was killed ({name}), {of_memory}by the kernel for lack of memory"
        return f"worker {pid} died of {name}" + (self._shared_memory() if number == signal.SIGBUS else "")

    def _shared_memory(self) -> str:
        need_bytes = (self._num_workers * self._prefetch + 1) * (self._batch_bytes or 0)
        return (
            f" ({_SHARED_MEMORY} has {format_bytes(shared_memory_free_bytes())} free; batches as large as the first, "
            f"read ahead, take {format_bytes(need_bytes)})"
        )


class _Tasks(Sampler[Task]):
    """The endless sequence of tasks from a cursor, so that workers are not restarted at each epoch."""

    def __init__(self, places: Places, cursor: Cursor) -> None:
        self._places, self._cursor = places, cursor

    def __iter__(self) -> Iterator[Task]:
        cursor = self._cursor
        while True:
            yield self._places.task(cursor)
            cursor = self._places.following(cursor)


class _Reading(Dataset[dict[str, Any] | PlimsollError]):
    """A torch data set whose index is a task, and whose item is the batch or the error of reading it."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, task: Task) -> dict[str, Any] | PlimsollError:
        try:
            fields = self._read(task)
        except PlimsollError as error:  # torch would replace its message by a traceback
            return error
        # Here an overflow of /dev/shm is an ordinary error. In the thread of the queue, torch 2.13 would print it and
        # drop the batch, and the training would wait for the batch forever.
        for field in fields.values():
            if isinstance(field, torch.Tensor):
                field.share_memory_()  # type: ignore[no-untyped-call]
        return fields


class _Ahead:
    """Workers that read batches ahead. ``cursor`` is the cursor of the next batch, or ``None`` after a failure."""

    def __init__(self, read: Read, places: Places, cursor: Cursor, num_workers: int, prefetch: int) -> None:
        self.cursor: Cursor | None = cursor
        self._places = places
        loader = DataLoader(
            _Reading(read),
            sampler=_Tasks(places, cursor),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=prefetch,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            multiprocessing_context="fork",
            generator=torch.Generator(),  # to draw from the default generator would change dropout masks
        )
        iterator: Any = iter(loader)
        self._iterator = iterator  # only this class uses its private attributes
        self._workers: list[BaseProcess] = iterator._workers
        torch._C._remove_worker_pids(id(self._iterator))
        iterator._worker_pids_set = False

    def take(self) -> dict[str, Any]:
        """Return the next batch, and advance the cursor.

        Raises:
            RuntimeError: if a worker has died.
            PlimsollError: if reading the batch failed in the worker.
        """
        cursor, self.cursor = self.cursor, None
        assert cursor is not None
        with self._deaths_interrupt():
            if not self._are_alive():
                raise RuntimeError("a worker has ended")
            fields: dict[str, Any] | PlimsollError = next(self._iterator)
        if isinstance(fields, PlimsollError):
            raise fields
        self.cursor = self._places.following(cursor)
        return fields

    def deaths(self) -> list[tuple[int, int]]:
        """Return the process ID and exit code of each worker that has ended."""
        ended = wait([worker.sentinel for worker in self._workers], _SECONDS_TO_DIE)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join()  # a process ends shortly after its files are closed
        return [(worker.pid or 0, worker.exitcode) for worker in self._workers if worker.exitcode is not None]

    def close(self) -> None:
        """End the workers.

        To end workers, torch waits without a time limit for a lock that a killed worker may have held. So if a worker
        has died, the other workers are killed, which loses nothing.
        """
        if self._are_alive():
            self._iterator._shutdown_workers()
        else:
            self._iterator._shutdown = True  # as torch does after its own shutdown
            for worker in self._workers:
                worker.kill()
            for queue in self._iterator._index_queues:
                queue.cancel_join_thread()
                queue.close()
        for worker in self._workers:
            worker.join()

    def _are_alive(self) -> bool:
        return all(worker.exitcode is None for worker in self._workers)

    @contextmanager
    def _deaths_interrupt(self) -> Iterator[None]:
        """Let torch raise the death of a worker only while this process waits for a batch, not during a step.

        Otherwise torch would raise it in its handler of SIGCHLD, in any code that runs at that moment.
        """
        key = next(_KEYS)
        torch._C._set_worker_pids(key, tuple(worker.pid for worker in self._workers if worker.pid))
        try:
            yield
        finally:
            torch._C._remove_worker_pids(key)


def shared_memory_free_bytes() -> int | None:
    """Return the free bytes of /dev/shm, or ``None`` if it does not exist."""
    if not os.path.isdir(_SHARED_MEMORY):
        return None
    status = os.statvfs(_SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def _spare_cores() -> int:
    """Return the number of cores for workers: the cores of this rank except one, but at least 1."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun sets it
    return max(len(os.sched_getaffinity(0)) // num_ranks - 1, 1)


def _begin_worker(parent: int, worker: int) -> None:
    """Set up a worker, and let the kernel kill it when the thread that started it ends.

    Torch checks every 5 s whether the parent has changed since the worker became ready. If the parent was killed before
    the worker became ready, the worker would never end.
    """
    end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads hang in a forked process; torch already uses one


def _as_it_is(fields: Any) -> Any:
    return fields


def _workers(number: int) -> str:
    return {0: "no workers", 1: "1 worker"}.get(number, f"{number} workers")
