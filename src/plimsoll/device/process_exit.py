"""Detection of whether and how a process has ended, even if this process did not start it.

The exit status comes from ``PIDFD_GET_INFO`` (Linux 6.15 or later). On older kernels it is read from /proc while the
process is a zombie, and is ``None`` (unknown) once its parent has collected it. A reused process id is not mistaken for
the process, unless the id is reused before `Watched` is created. Covers Linux from 5.3 on. On older kernels, or if a
sandbox refuses a pidfd, the start time identifies the process.

Sources: pidfd_open(2), proc_pid_stat(5), the kernel's ``include/uapi/linux/pidfd.h``.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from contextlib import suppress
from pathlib import Path

_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info), of 64 bytes
_INFO = struct.Struct("QQ11Ii")  # mask, cgroup, pid ... fsgid, exit_code
_HAS_EXIT_CODE = 1 << 3
_READ_AGAIN_SECONDS = 0.1
_STATE, _START_TICKS, _EXIT_STATUS = 0, 19, 49  # fields of /proc/PID/stat after the name


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot.

    ``None`` if the process does not exist or has ended.
    """
    fields = _stat_of(pid)
    return None if not fields or fields[_STATE] in {"Z", "X"} else int(fields[_START_TICKS])


class Watched:
    """A process for whose end this process can wait. Call `close` when finished."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._start_ticks = start_ticks(pid)
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.pidfd_open(pid)

    def close(self) -> None:
        """Close the file descriptor that refers to the process."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. A zombie has ended."""
        return self._start_ticks is None or start_ticks(self.pid) != self._start_ticks

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the process to end, and return whether it has ended."""
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        until = time.monotonic() + seconds
        while not self.has_ended and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _READ_AGAIN_SECONDS))
        return self.has_ended

    def exit_code(self) -> int | None:
        """Return the exit code, the negative number of the signal that killed the process, or ``None`` if unknown."""
        status = None if self._descriptor is None else _status_of(self._descriptor)
        if status is None:
            status = self._status_of_zombie()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _status_of_zombie(self) -> int | None:
        fields = _stat_of(self.pid)
        if not fields or fields[_STATE] != "Z" or int(fields[_START_TICKS]) != self._start_ticks:
            return None
        with suppress(OSError):
            if os.geteuid() in {0, os.stat(f"/proc/{self.pid}").st_uid}:  # other users read 0
                return int(fields[_EXIT_STATUS])
        return None


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the process name; empty if the process has ended.

    The name is cut off because it may contain spaces.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _status_of(descriptor: int) -> int | None:
    info = bytearray(_INFO.pack(_HAS_EXIT_CODE, *[0] * 13))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return status if mask & _HAS_EXIT_CODE else None
