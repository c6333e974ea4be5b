"""Child processes that end with their parent, so that no orphan continues to train or compute.

The kernel sends a signal to a child when its parent dies (``PR_SET_PDEATHSIG``, prctl(2)). Forked workers get SIGKILL.
Training processes get SIGTERM: they finish their step and save. The launcher of the ranks also gets SIGTERM, and
torchrun's agent forwards it to the ranks (`plimsoll.distributed.launch`). Outside Linux, the training process checks
after each step whether its parent process ID has changed.

Processes are used instead of threads because threads wait for the interpreter lock. If no process can be forked (a
daemonic process must not have children), the caller does the work itself.
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
    """Delay SIGINT until the end of the block, which forks.

    Otherwise, Python's hooks around a fork could raise `KeyboardInterrupt` and discard it, so that Ctrl-C has no
    effect.

    In a process with several threads, another thread may still receive the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forked_pool(
    stack: ExitStack, num_processes: int, begin: Callable[..., None], *arguments: Any
) -> ProcessPoolExecutor | None:
    """Return a pool of forked processes, or ``None`` if they cannot be started.

    Args:
        stack: the exit stack that shuts down the pool.
        num_processes: the number of processes.
        begin: a function that each process calls first.
        arguments: the arguments of ``begin``. They are inherited by the fork and need not be picklable.
    """
    if current_process().daemon:
        return None
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), _begin, (os.getpid(), begin, arguments))
    stack.callback(pool.shutdown, wait=True, cancel_futures=True)
    with warnings.catch_warnings(), suppress(OSError, BrokenProcessPool):
        # Python warns if a process with threads forks. The threads belong to libraries whose locks no child takes.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        with uninterrupted():
            begun = pool.submit(int)
        begun.result()
        return pool
    return None


def _begin(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends this process
    end_with(parent)
    begin(*arguments)


def ending_with_this() -> dict[str, str]:
    """Return environment variables that make a Plimsoll command end together with this process (`end_as_asked`)."""
    return os.environ | {_PARENT: str(os.getpid())}


def end_as_asked() -> None:
    """Make this process end with its parent if the environment variable of `ending_with_this` is set.

    The variable is then removed, so that child processes do not inherit it.
    """
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        end_with(int(parent))


def end_with(parent: int) -> None:
    """Make the kernel kill this process when ``parent``, its parent process, dies. Exit now if it is already dead."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


SUPERVISOR = "PLIMSOLL_SUPERVISOR"
"""The environment variable with the process ID of the supervisor."""

LAUNCHER = "PLIMSOLL_LAUNCHER"
"""The environment variable with the process ID of the launcher, if Plimsoll started this rank."""


def is_rank() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    is_one_of_several = (os.environ.get("WORLD_SIZE") or "1") != "1"
    return bool(os.environ.get("RANK")) and (is_one_of_several or "TORCHELASTIC_RUN_ID" in os.environ)


def begin_worker() -> None:
    """Report fatal errors of this process to its supervisor, and end when the supervisor dies."""
    tell_supervisor()
    begin_supervised()


def begin_supervised() -> None:
    """Make the kernel send SIGTERM to this process when its supervisor dies, or now if it is already dead."""
    if parent_that_watches() is None:
        return
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_that_watches():  # the supervisor died before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def parent_that_watches() -> int | None:
    """Return the process ID of the supervisor that started this process; ``None`` if no supervisor started it."""
    if is_rank():  # the parent of a rank is its supervisor: torchrun, or a script that it runs
        return int(os.environ.get(LAUNCHER, os.getppid()))
    return int(os.environ[SUPERVISOR]) if SUPERVISOR in os.environ else None
