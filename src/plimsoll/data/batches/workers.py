"""Batches read ahead by worker processes, in order; what happens to a worker is told, and loses and repeats nothing.

The processes, their queues and the watch they keep on this process are those of `torch.utils.data.DataLoader`. Where a
worker is killed, crashes or fails, all are begun again at the cursor with half as many, in the end with none; fewer
stay fewer for the life of the `Feed`. An error that also occurs without workers is raised as it is.

A batch in flight is in shared memory: (workers x prefetch + 1) x its bytes, exact in 12 of 12 measured cases. The data
set is not read in this process before the workers are forked, so a file that it opens when it is first read is not
shared among them. NOT covered: start methods other than fork, with which each worker imports torch (226 MiB of it).
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
_WORKER_BYTES = 12 << 20  # of a forked worker, before its batches; measured, torch 2.13
_FAILURES = (RuntimeError, OSError, EOFError, MemoryError)  # of a process, of what it is connected by, of memory
_CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_NO_SPACE = os.strerror(errno.ENOSPC)
_KEYS = count()  # torch takes each but once
_SECONDS_TO_DIE = 1.0  # a connection breaks a little before its process has ended

Task = tuple[int, NDArray[np.int64]]  # an epoch and some samples


class Places(Protocol):
    """The batches that there are to read."""

    def task(self, cursor: Cursor) -> Task:
        """Return what is read at a cursor."""
        ...

    def following(self, cursor: Cursor) -> Cursor:
        """Return the cursor after a cursor."""
        ...


Read = Callable[[Task], dict[str, Any]]


class Feed:
    """The batches at cursors, read here or ahead in worker processes.

    Args:
        read: reads some samples; called in the workers.
        places: which they are.
        workers: how many processes, or ``"auto"``: by cores and ``budget_bytes``, none if ``reads_fast``.
        prefetch: how many batches each worker reads ahead.
        reads_fast: whether reading takes no longer than handing over what a worker has read.
        budget_bytes: what all workers and their batches may take in all; ``None`` for no limit.
        on_event: told in a sentence of everything that was survived.
        oom_kills: how many processes the kernel has killed for memory so far; ``None`` where it is not known.
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
        self._kills: int | None = None  # before these workers began

    @property
    def num_workers(self) -> int:
        """How many worker processes there are, or will be with the first batch."""
        return self._num_workers

    def fields(self, cursor: Cursor) -> dict[str, Any]:
        """Return the batch at a cursor; one that follows the last is ready, or being read.

        Raises:
            KilledError: if reading crashes the last worker.
        """
        while self._num_workers:
            try:
                return self._read_ahead(cursor)
            except _FAILURES as error:
                said = (str(error).splitlines() or [type(error).__name__])[-1]  # first comes where it was raised
            self._go_on_with_fewer(said)  # outside of except: the error holds the frames, and they the batches
        return self._read(self._places.task(cursor))

    def close(self) -> None:
        """End the workers; the next batch begins them again."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _read_ahead(self, cursor: Cursor) -> dict[str, Any]:
        if self._ahead is not None and self._ahead.cursor != cursor:
            self.close()
        is_first = self._batch_bytes is None  # a single worker reads it, and its size says how many may follow
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
        """Take fewer workers, or read less ahead, if there is too little memory for what is asked."""
        batch_bytes = max(self._batch_bytes or 0, 1)
        if self._is_auto and self._budget_bytes is not None:
            of_one = _WORKER_BYTES + (self._prefetch + 1) * batch_bytes
            self._num_workers = min(self._num_workers, self._budget_bytes // of_one)
        free_bytes = shared_memory_free_bytes()
        need_bytes = self._num_workers * self._prefetch * batch_bytes  # beside the one that is there already
        if free_bytes is None or need_bytes <= free_bytes:
            return
        most_batches = free_bytes // batch_bytes
        asked = f"{self._num_workers} workers that read {self._prefetch} batches ahead"
        self._num_workers = min(self._num_workers, most_batches)
        self._prefetch = min(self._prefetch, most_batches // max(self._num_workers, 1)) or 1
        self._on_event(
            f"{_SHARED_MEMORY} has {format_bytes(free_bytes)} free, but {asked} need {format_bytes(need_bytes)} of it "
            f"({format_bytes(batch_bytes)} a batch): going on with {_workers(self._num_workers)} that read "
            f"{self._prefetch} ahead (in a container, --shm-size gives more)"
        )

    def _go_on_with_fewer(self, said: str) -> None:
        deaths = self._ahead.deaths() if self._ahead is not None else []  # None: it could not be forked
        self.close()
        causes = [self._cause_of_death(pid, code) for pid, code in deaths] or [said]
        cause = "; ".join(causes) + (self._shared_memory() if _NO_SPACE in said else "")
        crash = next((-code for _, code in deaths if -code in _CRASHES), None)
        if crash and self._num_workers == 1:  # such as a bus error where a mapped file has become shorter
            raise KilledError(
                f"the worker that reads the data crashed: {cause}; it is not read in this process, which would crash "
                f"too: check that no file of the data has become shorter, or see where it crashes with workers=0",
                crash,
            )
        asked, self._num_workers = self._num_workers, self._num_workers // 2
        self._on_event(
            f"reading with {_workers(asked)} failed: {cause}. Going on at the same batch with "
            f"{_workers(self._num_workers)}: no sample is lost or comes twice"
        )

    def _cause_of_death(self, pid: int, exit_code: int) -> str:
        if exit_code >= 0:
            return f"worker {pid} ended with exit code {exit_code}"
        number = -exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number == signal.SIGKILL:
            kills = self._oom_kills()
            if kills is None or self._kills is None:
                return f"worker {pid} was killed ({name}), by the kernel for lack of memory or by somebody"
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
    """What is read from a cursor on, without an end, so that the workers stay over the epochs."""

    def __init__(self, places: Places, cursor: Cursor) -> None:
        self._places, self._cursor = places, cursor

    def __iter__(self) -> Iterator[Task]:
        cursor = self._cursor
        while True:
            yield self._places.task(cursor)
            cursor = self._places.following(cursor)


class _Reading(Dataset[dict[str, Any] | PlimsollError]):
    """Batches by what is to be read."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, task: Task) -> dict[str, Any] | PlimsollError:
        try:
            fields = self._read(task)
        except PlimsollError as error:  # torch would make a traceback of its message
            return error
        # An overflow of /dev/shm is an error like any other here. In the thread of the queue torch 2.13 prints it and
        # drops the batch, and the training waits for it for ever.
        for field in fields.values():
            if isinstance(field, torch.Tensor):
                field.share_memory_()  # type: ignore[no-untyped-call]
        return fields


class _Ahead:
    """Some workers that read the batches from a cursor on; ``cursor`` is of the next, ``None`` after a failure."""

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
            generator=torch.Generator(),  # or it takes a number from the default one, and the dropout masks are others
        )
        iterator: Any = iter(loader)
        self._iterator = iterator  # its private names are used in this class only
        self._workers: list[BaseProcess] = iterator._workers
        torch._C._remove_worker_pids(id(self._iterator))
        iterator._worker_pids_set = False

    def take(self) -> dict[str, Any]:
        """Return the next batch; the cursor moves on.

        Raises:
            RuntimeError: if a worker has died.
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
        """Return the process number and exit code of the workers that have died."""
        ended = wait([worker.sentinel for worker in self._workers], _SECONDS_TO_DIE)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join()  # it ends a little after its files are closed
        return [(worker.pid or 0, worker.exitcode) for worker in self._workers if worker.exitcode is not None]

    def close(self) -> None:
        """End the workers.

        One that was killed may have held a lock that torch takes to end the others, and waits for without end: these
        have nothing to lose, and are killed too.
        """
        if self._are_alive():
            self._iterator._shutdown_workers()
        else:
            self._iterator._shutdown = True  # as torch notes that it has done that
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
        """Let torch raise what happens to a worker while this process waits for it, and never in the middle of a step.

        Torch raises it in its handler of SIGCHLD, wherever the process is at that moment.
        """
        key = next(_KEYS)
        torch._C._set_worker_pids(key, tuple(worker.pid for worker in self._workers if worker.pid))
        try:
            yield
        finally:
            torch._C._remove_worker_pids(key)


def shared_memory_free_bytes() -> int | None:
    """Return how much /dev/shm has free, ``None`` where there is none."""
    if not os.path.isdir(_SHARED_MEMORY):
        return None
    status = os.statvfs(_SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def _spare_cores() -> int:
    """Return how many cores this process may use beside its own, and beside those of the other ranks of the machine."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun sets it
    return max(len(os.sched_getaffinity(0)) // num_ranks - 1, 1)


def _begin_worker(parent: int, worker: int) -> None:
    """Set up a worker, and let the kernel end it with the thread that began it.

    Torch checks every 5 s for the process that is the parent when the worker is ready: a worker whose parent was killed
    before that stays for ever.
    """
    end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a forked process hang; torch's are one already


def _as_it_is(fields: Any) -> Any:
    return fields


def _workers(number: int) -> str:
    return {0: "no workers", 1: "1 worker"}.get(number, f"{number} workers")
