"""Memory limits, use and OOM kills of the control groups of a process (containers, Slurm, systemd).

Control groups of version 1 and 2 are read, also if a machine mounts both. A limit of any ancestor applies too, so all
visible ancestors are read. For another process, only hierarchies mounted here count: a process in a container may show
fewer limits than it has, and a process outside this container shows none.

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
    """The names of files and keys in one version of control groups.

    Attributes:
        version: ``v1`` or ``v2``.
        limit: the file with the memory limit.
        use: the file with the bytes in use.
        inactive_file: the key of inactive cached file pages in ``memory.stat``.
        kills: the file and key of the number of OOM kills.
    """

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
    """The number of processes that the kernel has killed because memory ran out.

    Attributes:
        number: the number of killed processes.
        is_whole_machine: whether kills on the whole machine are counted, not only kills in the control group.
    """

    number: int
    is_whole_machine: bool


class _Group(NamedTuple):
    """A control group of a process.

    Attributes:
        folder: the folder of the group.
        mount: the mount point of the hierarchy that the group belongs to.
        layout: the names of the files in the folder.
    """

    folder: Path
    mount: Path
    layout: _Layout


def limits(root: Path = _ROOT) -> tuple[Limit, ...]:
    """Return every memory limit on this process that its control group or an ancestor of the group sets.

    Args:
        root: the root of the file system to read, for tests.
    """
    return tuple(limit for limit, _ in _limited_levels(_memory_groups(root)))


def uses(pids: Iterable[int], root: Path = _ROOT) -> tuple[tuple[Limit, int], ...]:
    """Return every control group limit on these processes, each with the bytes in use.

    Inactive cached file pages do not count as used.
    """
    groups = [group for pid in pids for group in _memory_groups(root, pid)]
    return tuple(_limited_levels(dict.fromkeys(groups)))


def free_bytes(root: Path = _ROOT) -> int | None:
    """Return the free bytes under the tightest control group limit, or ``None`` without a limit.

    Inactive cached file pages count as free: the kernel drops them before it kills.
    """
    return min((max(0, limit.bytes - used) for limit, used in _limited_levels(_memory_groups(root))), default=None)


def oom_kill_count(root: Path = _ROOT) -> OomKills | None:
    """Return the number of OOM kills in this process's control group, or otherwise on the machine.

    ``None`` if the kernel counts neither (Linux before 4.13, some sandboxes).
    """
    return KillCounter(root=root).read()


class KillCounter:
    """Counter of the OOM kills that affect a process. It also works after the process has ended.

    Args:
        pid: id of the process; ``None`` for this process.
        root: the root of the file system to read, for tests.
    """

    def __init__(self, pid: int | None = None, root: Path = _ROOT) -> None:
        self._groups = _memory_groups(root, pid)
        self._machine = root / "proc/vmstat"

    def read(self) -> OomKills | None:
        """Return the number of OOM kills; ``None`` if the kernel does not count them.

        They are counted since the group was created or, if its kills are not counted, since the machine was booted.
        """
        for group in self._groups:
            file, key = group.layout.kills
            count = _number(group.folder / file, key)
            if count is not None:
                return OomKills(count, is_whole_machine=False)
        count = _number(self._machine, "oom_kill")
        return None if count is None else OomKills(count, is_whole_machine=True)


def _limited_levels(groups: Iterable[_Group]) -> list[tuple[Limit, int]]:
    """Return every limit of these groups and their ancestors, each with the bytes in use.

    A limit that several groups share is returned once.
    """
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
    """Return the control group of a process in every mounted hierarchy that can have memory limits.

    Args:
        root: the root of the file system to read.
        pid: id of the process; ``None`` for this process.
    """
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
    """Return the paths of a process's control groups, by kind of hierarchy.

    The kinds are ``cgroup2``, and ``cgroup`` for the memory hierarchy of version 1.
    """
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
    """Return the number in a file; ``None`` if the file is missing or contains "max".

    With ``key``, return the number after this word, in a file of lines "key number".
    """
    words = [line.split() for line in _lines(path)]
    value = next((row[-1] for row in words if key is None or row[0] == key), "max")
    return int(value) if value != "max" else None
