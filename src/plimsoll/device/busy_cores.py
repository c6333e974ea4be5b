"""Detection of other programs that keep the cores of this process busy.

    others = OtherPrograms()
    ...
    print(others.sentence())  # "This machine is busy: python3 (process 4711) uses 1.0 of 2 cores. ..."

Does NOT name processes outside this container, and does not observe GPUs. Source: proc_stat(5). Needs no torch.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

import psutil

_LEAST_CORES = 0.3  # any desktop uses less than this
_SAMPLE_SECONDS = 0.1


class Program(NamedTuple):
    """A process of another program, and the number of cores that it uses."""

    pid: int
    name: str
    cores: float


class OtherPrograms:
    """CPU use by programs other than our own, since this object was created.

    Args:
        ours: id of our process, whose descendants also count as ours; this process by default.
    """

    def __init__(self, ours: int | None = None) -> None:
        self._ours = os.getpid() if ours is None else ours
        self._since, self._busy_before, self._own_before = _now(), _busy_seconds(), time.process_time()

    def sentence(self, num_threads: int | None = None) -> str:
        """Return a sentence about programs that use cores needed by this process, or ``""`` if enough cores are free.

        Takes 0.1 s if the cores were busy, and almost no time otherwise.

        Args:
            num_threads: number of cores that this process needs, one for each of its threads; all cores by default.
        """
        num_cores = _num_cores()
        seconds = max(_now() - self._since, 1e-3)
        own_seconds = time.process_time() - self._own_before
        free = num_cores - (num_cores if num_threads is None else num_threads)
        enough = free + _LEAST_CORES
        if (_busy_seconds() - self._busy_before - own_seconds) / seconds < enough:
            return ""
        programs, others = self._sampled()
        if others < enough:
            return ""
        named = [program for program in programs if program.cores >= _LEAST_CORES / 2][:3]
        who = ", ".join(f"{one.name} (process {one.pid}) uses {one.cores:.1f}" for one in named)
        if not named:
            who = f"programs that cannot be seen from here use {others:.1f}"
        cores = f"{num_cores} core{'' if num_cores == 1 else 's'}"
        return f"This machine is busy: {who} of {cores}. Steps will take longer than planned."

    def _sampled(self) -> tuple[list[Program], float]:
        """Measure the other programs for 0.1 s.

        Returns:
            the visible programs, largest use first, and the number of cores that all other programs use, visible or
            not.
        """
        started, busy, before = _now(), _busy_seconds(), _seconds_of_processes()
        time.sleep(_SAMPLE_SECONDS)
        after, busy = _seconds_of_processes(), _busy_seconds() - busy
        seconds = _now() - started
        programs, own_seconds = [], 0.0
        for pid, (name, used, parent) in after.items():
            gained = used - before[pid][1] if pid in before else 0.0
            if self._is_ours(pid, parent, after):
                own_seconds += gained
            else:
                programs.append(Program(pid, name, gained / seconds))
        programs.sort(key=lambda program: -program.cores)
        return programs, max(busy - own_seconds, 0.0) / seconds

    def _is_ours(self, pid: int, parent: int, known: dict[int, tuple[str, float, int]]) -> bool:
        while pid != self._ours:
            if parent not in known:
                return False
            pid, parent = parent, known[parent][2]
        return True


def _now() -> float:
    return time.perf_counter()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _busy_seconds() -> float:
    """Return the total seconds since boot that the cores available to this process were busy."""
    cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    times = [cores[place] for place in usable if place < len(cores)]
    # "steal": time that the host of a virtual machine gave to other virtual machines
    return sum(getattr(one, kind, 0.0) for one in times for kind in ("user", "nice", "system", "steal"))


def _seconds_of_processes() -> dict[int, tuple[str, float, int]]:
    """Return the name, CPU seconds and parent id of each visible process, by process id."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error), process.oneshot():
            used = process.cpu_times()
            found[process.pid] = (process.name(), used.user + used.system, process.ppid())
    return found
