"""Whether a process has ended, and how, also of one that this process did not start.

Source: pidfd_open(2), proc_pid_stat(5), and the kernel's ``include/uapi/linux/pidfd.h``: ``PIDFD_GET_INFO`` tells the
exit status of a process that is gone since Linux 6.15. Before, it is read from /proc as long as the parent has not
asked for it (a zombie), and otherwise ``None``: unknown. A number that the kernel has given to another process since is
not taken for the process (but between finding its number and `Watched`). Covers Linux from 5.3 on; on older ones,
and where a sandbox refuses a pidfd, the time at which the process was started tells it from others.
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
_STATE, _START_TICKS, _EXIT_STATUS = 0, 19, 49  # fields of /proc/PID/stat behind the name


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; ``None`` where there is none or it ended."""
    fields = _stat_of(pid)
    return None if not fields or fields[_STATE] in {"Z", "X"} else int(fields[_START_TICKS])


class Watched:
    """One process that is waited for; close it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._start_ticks = start_ticks(pid)
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.pidfd_open(pid)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def has_ended(self) -> bool:
        """Whether it has, also where its parent has not asked how."""
        return self._start_ticks is None or start_ticks(self.pid) != self._start_ticks

    def wait(self, seconds: float) -> bool:
        """Wait until it ends, but no longer than this; return whether it has."""
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        until = time.monotonic() + seconds
        while not self.has_ended and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _READ_AGAIN_SECONDS))
        return self.has_ended

    def exit_code(self) -> int | None:
        """Return how it ended: its exit code, or less than 0 the signal that killed it; ``None`` where unknown."""
        status = None if self._descriptor is None else _status_of(self._descriptor)
        if status is None:
            status = self._status_of_zombie()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _status_of_zombie(self) -> int | None:
        fields = _stat_of(self.pid)
        if not fields or fields[_STATE] != "Z" or int(fields[_START_TICKS]) != self._start_ticks:
            return None
        with suppress(OSError):
            if os.geteuid() in {0, os.stat(f"/proc/{self.pid}").st_uid}:  # the kernel says 0 to others
                return int(fields[_EXIT_STATUS])
        return None


def _stat_of(pid: int) -> list[str]:
    """The fields behind the name, which may hold spaces and brackets; none where there is no such process."""
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
