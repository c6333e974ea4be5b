"""What processes use of host memory, seen from outside, and the limits on them: a sample takes no torch.

Source: proc_pid_status(5), proc_pid_limits(5). Covers Linux: a process and what it started, ``RLIMIT_DATA``, the
memory of the machine, and the control groups of this process, which need not be those of the watched one. Does NOT
cover GPUs, nor smaps (slow on large processes): pages that a fork shares are counted in each process.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from plimsoll.device import cgroup
from plimsoll.errors import InputError
from plimsoll.records.watch import Line, ProcessUse

_FIELD = re.compile(r"^(\w+):\s+(\S+)", re.MULTILINE)
_DATA_LIMIT = re.compile(r"^Max data size\s+(\d+)", re.MULTILINE)


def family_of(pid: int) -> tuple[ProcessUse, ...]:
    """Return a process and its descendants, as they are now; empty once it has ended.

    Raises:
        InputError: if the process belongs to someone else.
    """
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return ()
    first = _use_of(pid)
    if first is None:
        return ()
    return (first, *(use for child in children if (use := _use_of(child.pid)) is not None))


def lines_of(processes: tuple[ProcessUse, ...]) -> tuple[Line, ...]:
    """Return every limit on these processes, with what is used of it."""
    machine = psutil.virtual_memory()
    lines = [
        Line(name="memory of the machine", used_bytes=machine.total - machine.available, limit_bytes=machine.total)
    ]
    for limit, used_bytes in cgroup.uses():
        lines.append(Line(name=limit.source, used_bytes=used_bytes, limit_bytes=limit.bytes))
    for use in processes:
        if use.data_limit_bytes is not None:
            name = f"RLIMIT_DATA of {use.pid}"
            lines.append(Line(name=name, used_bytes=use.data_bytes, limit_bytes=use.data_limit_bytes))
    return tuple(lines)


def _use_of(pid: int) -> ProcessUse | None:
    """Read one process; ``None`` where it has ended, also where its parent has not asked how."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = dict(_FIELD.findall((folder / "status").read_text(errors="replace")))
        limit = _DATA_LIMIT.search((folder / "limits").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        raise InputError(
            f"cannot read process {pid}, it is another user's: give the --pid of one of your own"
        ) from None
    if "VmData" not in fields:
        return None
    return ProcessUse(
        pid=pid,
        parent=int(fields["PPid"]),
        name=fields["Name"],
        private_bytes=_bytes(fields, "RssAnon"),
        file_bytes=_bytes(fields, "RssFile"),
        shared_bytes=_bytes(fields, "RssShmem"),
        swap_bytes=_bytes(fields, "VmSwap"),
        data_bytes=_bytes(fields, "VmData") + _bytes(fields, "VmStk"),
        data_limit_bytes=int(limit[1]) if limit else None,
    )


def _bytes(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, 0)) * 1024
