"""Memory limits, use and OOM kills of the control groups of a process (containers, Slurm, systemd).

Version 1, version 2, and hybrid machines that mount both are read. A limit of any ancestor applies too, so all visible
ancestors are read. For another process, only hierarchies mounted here count: a process in a container may show fewer
limits than it has, and a process outside this container shows none.

If no group counts kills, ``oom_kill`` of /proc/vmstat is used, which counts kills on the whole machine since boot.

Not covered: ``memory.high``, which slows a process down but does not kill it, and swap. Needs no torch.

Sources: the kernel's admin-guide/cgroup-v2 ("Memory") and cgroup-v1/memory documents, proc_pid_mountinfo(5).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from plimsoll.records.device import Limit

_ROOT = Path("/")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page below 2^63


class _Layout(NamedTuple):
    """The names of the files and of their keys in one version of control groups."""

    version: str
    limit: str
    use: str
    inactive_file: str
    kills: tuple[str, str]


_LAYOUTS = {
    "cgroup2": _Layout("v2", "memory.max", "memory.current", "inactive_file", ("memory.events", "oom_kill")),
    "cgroup": _Layout(
        "v1",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        ("memory.oom_control", "oom_kill"),
    ),
}


class OomKills(NamedTuple):
    """The number of processes that the kernel killed for memory, in this group or on the whole machine."""

    number: int
    is_whole_machine: bool


class _Group(NamedTuple):
    """The folder of a process's group, the mount point of its hierarchy, and the layout of its files."""

    folder: Path
    mount: Path
    layout: _Layout


def limits(root: Path = _ROOT) -> tuple[Limit, ...]:
    """Return every memory limit on this process, from its group and all ancestors.

    Args:
        root: the root of the file system to read, for tests.
    """
    return tuple(limit for limit, _ in _limited_levels(_memory_groups(root)))


def uses(pids: Iterable[int], root: Path = _ROOT) -> tuple[tuple[Limit, int], ...]:
    """Return every limit on these processes, each with the bytes in use, without inactive cached file pages."""
    groups = [group for pid in pids for group in _memory_groups(root, pid)]
    return tuple(_limited_levels(dict.fromkeys(groups)))


def free_bytes(root: Path = _ROOT) -> int | None:
    """Return the free bytes under the tightest limit, or ``None`` if there is no limit.

    Inactive cached file pages count as free: the kernel drops them before it kills.
    """
    return min((max(0, limit.bytes - used) for limit, used in _limited_levels(_memory_groups(root))), default=None)


def oom_kill_count(root: Path = _ROOT) -> OomKills | None:
    """Return the number of processes of this group, or otherwise of the machine, that the kernel killed for memory.

    ``None`` if neither is counted (Linux before 4.13, some sandboxes).
    """
    return KillCounter(root=root).read()


class KillCounter:
    """Counter of OOM kills for a process (by default, this process), which also works after the process has ended."""

    def __init__(self, pid: int | None = None, root: Path = _ROOT) -> None:
        self._groups = _memory_groups(root, pid)
        self._machine = root / "proc/vmstat"

    def read(self) -> OomKills | None:
        """Return the kills since the group was created or the machine was booted; ``None`` if they are not counted."""
        for group in self._groups:
            file, key = group.layout.kills
            count = _number(group.folder / file, key)
            if count is not None:
                return OomKills(count, is_whole_machine=False)
        count = _number(self._machine, "oom_kill")
        return None if count is None else OomKills(count, is_whole_machine=True)


def _limited_levels(groups: Iterable[_Group]) -> list[tuple[Limit, int]]:
    """Return every limit with its bytes in use, from each group up to the root of its hierarchy, without duplicates."""
    levels: dict[str, tuple[Limit, int]] = {}
    for group in groups:
        for folder in (group.folder, *group.folder.parents):
            limit_bytes = _number(folder / group.layout.limit)
            if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
                path = "/".join(("", *folder.relative_to(group.mount).parts)) or "/"
                source = f"cgroup {group.layout.version} {group.layout.limit} of {path}"
                levels[source] = (Limit(source=source, bytes=limit_bytes), _busy_bytes(folder, group.layout))
            if folder == group.mount:
                break
    return list(levels.values())


def _busy_bytes(folder: Path, layout: _Layout) -> int:
    return (_number(folder / layout.use) or 0) - (_number(folder / "memory.stat", layout.inactive_file) or 0)


def _memory_groups(root: Path, pid: int | None = None) -> list[_Group]:
    """Find the group of a process (``None``: this process) in every mounted hierarchy that can have memory limits."""
    own, paths = _group_paths(root, "self"), _group_paths(root, "self" if pid is None else str(pid))
    groups = []
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        mounted, mount = left.split()[3:5]
        kind, _, options = right.split(maxsplit=2)
        is_named = pid is None or kind in paths  # an ended process has none
        if is_named and (kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))):
            # In a container, the mount may begin at the container's group; a group outside of it appears as "/..".
            path, point = PurePosixPath(paths.get(kind, "/")), root / mount.lstrip("/")
            if path.is_relative_to(mounted) and ".." not in path.parts:
                groups.append(_Group(point / path.relative_to(mounted), point, _LAYOUTS[kind]))
            elif paths.get(kind) == own.get(kind):
                groups.append(_Group(point, point, _LAYOUTS[kind]))
    return groups


def _group_paths(root: Path, process: str) -> dict[str, str]:
    """Map ``cgroup2`` and ``cgroup`` (version 1's memory hierarchy) to the path of a process's group."""
    paths = {}
    for line in _lines(root / f"proc/{process}/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    return paths


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # missing, or removed with its process or group during the read
        return []


def _number(path: Path, key: str | None = None) -> int | None:
    """Read the number in a file, or after ``key`` in a file of "key number" lines; ``None`` for "max" or if missing."""
    words = [line.split() for line in _lines(path)]
    value = next((row[-1] for row in words if key is None or row[0] == key), "max")
    return int(value) if value != "max" else None
