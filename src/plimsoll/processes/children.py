"""Processes that this one forks or starts, and that end with it: none trains on, or works, alone.

The kernel is asked to send a signal to a process whose parent dies (``PR_SET_PDEATHSIG``, prctl(2)): SIGKILL to one
that was forked to work on what it inherits; SIGTERM to one of a run, which finishes its step and saves. What starts the
ranks (`plimsoll.distributed.launch`) is asked too, and torchrun's agent hands the signal on to them. Where no signal
came (not Linux), the number of the parent is another than it was, which the training checks after each step.

Threads that share an interpreter wait for each other, processes do not. Where none can be forked (a daemonic process
may have no children) there are none, and the caller does the work itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import current_process, get_context
from typing import Any

from plimsoll.device.aborts import tell_supervisor

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT = "PLIMSOLL_PARENT"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have Ctrl-C wait for the block: what Python calls at a fork would raise `KeyboardInterrupt` and ignore it.

    Does NOT do so in a process with other threads, one of which is interrupted then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forked_pool(
    stack: ExitStack, num_processes: int, begin: Callable[..., None], *arguments: Any
) -> ProcessPoolExecutor | None:
    """Start processes that end with the stack; ``None`` where they cannot be started.

    Args:
        stack: closes the pool.
        num_processes: how many.
        begin: called first in each of them.
        arguments: of ``begin``; they are inherited and not sent, so they can be anything.
    """
    if current_process().daemon:
        return None
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), _begin, (os.getpid(), begin, arguments))
    stack.callback(pool.shutdown, wait=True, cancel_futures=True)
    with warnings.catch_warnings(), suppress(OSError, BrokenProcessPool):
        # A library may have started threads; what is called in the children takes none of their locks.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        with uninterrupted():
            begun = pool.submit(int)
        begun.result()
        return pool
    return None


def _begin(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends this process
    end_with(parent)
    begin(*arguments)


def ending_with_this() -> dict[str, str]:
    """Return the environment in which a Plimsoll command that this process starts ends with it, see `end_as_asked`."""
    return os.environ | {_PARENT: str(os.getpid())}


def end_as_asked() -> None:
    """End this process with the one that started it, where that asked for it; not those that this one starts."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        end_with(int(parent))


def end_with(parent: int) -> None:
    """Have the kernel end this process with the one that forked it, which may have ended by now."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


SUPERVISOR = "PLIMSOLL_SUPERVISOR"
"""The environment's name for the process that watches this one."""

LAUNCHER = "PLIMSOLL_LAUNCHER"
"""The environment's name for the process that has started this one as a rank, where that is ours."""


def is_rank() -> bool:
    """Whether torchrun has started this process, also as the only one that is left, or what sets the same variables."""
    is_one_of_several = (os.environ.get("WORLD_SIZE") or "1") != "1"
    return bool(os.environ.get("RANK")) and (is_one_of_several or "TORCHELASTIC_RUN_ID" in os.environ)


def begin_worker() -> None:
    """Write faults of this process where the one reads them that watches it, and end when that dies."""
    tell_supervisor()
    begin_supervised()


def begin_supervised() -> None:
    """Have the kernel send SIGTERM when the process dies that watches this one; end now if it has."""
    if parent_that_watches() is None:
        return
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_that_watches():  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def parent_that_watches() -> int | None:
    """Return the number of the process that watches this one, as it was when this one began; ``None`` without."""
    if is_rank():  # one that torchrun has started is watched by whatever its parent is: a script may be between them
        return int(os.environ.get(LAUNCHER, os.getppid()))
    return int(os.environ[SUPERVISOR]) if SUPERVISOR in os.environ else None
