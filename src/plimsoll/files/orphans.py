"""A process of a run whose supervisor dies finishes its step, saves and ends; it never trains on alone.

The kernel sends SIGTERM to a process whose parent dies, if it was asked to (``PR_SET_PDEATHSIG``). So does what starts
the ranks (`plimsoll.distributed.launch`), and torchrun's agent hands it on to them. Where no signal came (not Linux),
the number of the parent is another than it was, which the training looks at after each step.

Source: prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from plimsoll.device.aborts import tell_supervisor

SUPERVISOR = "PLIMSOLL_SUPERVISOR"
"""The environment's name for the process that watches this one."""

LAUNCHER = "PLIMSOLL_LAUNCHER"
"""The environment's name for the process that has started this one as a rank, where that is ours."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
