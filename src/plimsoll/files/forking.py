"""Processes forked from this one for work on the processor: they inherit what they work on, and end with their parent.

Threads that share an interpreter wait for each other, processes do not. Where none can be started (a daemonic process
may have no children) there are none, and the caller does the work itself. Does NOT cover other systems than Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import current_process, get_context
from typing import Any

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
