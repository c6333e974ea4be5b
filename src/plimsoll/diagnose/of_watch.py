"""The diagnosis of a recorded watch: processes that grew, limits that were reached, and OOM kills.

Only the sizes of processes are visible from outside. The diagnosis names the process and the rate of its growth, not
the line of code. The remedies tell where to look next. A process grows if `plimsoll.diagnose.growth` finds steady
growth of its private memory over the samples. A run may use all of its budget. So the budget, and the ``RLIMIT_DATA``
that enforces it, are reported only if memory ran out. Not handled: growth that would end by itself is reported, too.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from plimsoll.diagnose.growth import growth_of
from plimsoll.records.diagnosis import Diagnosis, Fact, Finding
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.records.watch import Line, LineKind, ProcessUse, WatchRecord, WatchSample

_PAGE = "docs/watch.md"
_REACHED_SHARE = 0.95
_FEWEST_SWAP_BYTES = 16 << 20
_FEWEST_SAMPLES = 11  # the minimum for `growth_of`, with its warm-up

Points = list[tuple[float, ProcessUse]]


class _Grown(NamedTuple):
    """The growth of one process during a watch.

    Attributes:
        use: memory use of the process when the measured growth ends.
        risen_bytes: the bytes by which its private memory grew.
        bytes_per_second: the rate of the growth.
        seconds: the times at which the measured growth begins and ends, since the start of the watch.
    """

    use: ProcessUse
    risen_bytes: int
    bytes_per_second: float
    seconds: tuple[float, float]

    @property
    def name(self) -> str:
        return f"process {self.use.pid} ({self.use.name})"


_REMEDIES: dict[LineKind, str] = {
    "machine": "Close other programs on the machine, or limit the training: `plimsoll train job.yaml --budget SIZE` "
    "finds a plan that fits.",
    "swap": "Close other programs on the machine: once swap is full, the kernel kills processes.",
    "shm": "Give the container more shared memory (`docker run --shm-size=8g`, or an emptyDir of medium Memory at "
    "/dev/shm), or use fewer DataLoader workers.",
    "cgroup": "Raise the limit of the control group (`docker run --memory`, `resources.limits.memory`, `sbatch --mem`) "
    "or stay below it: `plimsoll train job.yaml --budget SIZE`.",
    "data": "Raise the limit (`ulimit -d`), or stay below it: `plimsoll train job.yaml --budget SIZE`.",
    "address": "Raise the limit (`ulimit -v`): it counts all reserved addresses, even if they are never touched.",
    "budget": "Give a larger --budget, or run `plimsoll explain` on the run directory.",
    "gpu": "Run `nvidia-smi` to see who else uses the GPU; `plimsoll plan job.yaml --budget SIZE` finds a plan that "
    "fits.",
}


def diagnosis_of_watch(record: WatchRecord) -> Diagnosis:
    """Explain a recorded watch."""
    grown = [*_grown(record)]
    findings = [*grown, *_killed(record), *_reached(record), *_swapped(record)]
    return Diagnosis(
        subject=f"watch of {record.subject}",
        peak_bytes=max((sample.private_bytes for sample in record.samples), default=None),
        findings=tuple(sorted(findings, key=lambda finding: -(finding.effect_bytes or 0))),
        notes=tuple(_notes(record, has_grown=bool(grown))),
    )


def _notes(record: WatchRecord, *, has_grown: bool) -> Iterator[str]:
    num = len(record.samples)
    span = f" over {format_seconds(record.samples[-1].seconds)}" if num else ""
    yield f"From {num:,} sample{'s' * (num != 1)}{span}: memory between the samples was not seen."
    if num < _FEWEST_SAMPLES and not has_grown:
        yield f"Whether a process grows cannot be told from fewer than {_FEWEST_SAMPLES} samples."
    if record.end is None:
        yield "The recording breaks off: the watch itself was killed, or is still running."
    elif record.end.how != "out_of_memory":
        yield f"The end: {record.end.text}."


def _grown(record: WatchRecord) -> Iterator[Finding]:
    """Yield a finding for each process that grew. Child processes of the same parent share one finding."""
    grown = [found for points in record.uses_by_pid.values() if (found := _growth(points)) is not None]
    parents = {use.pid for sample in record.samples for use in sample.processes}
    workers: dict[int, list[_Grown]] = {}
    for one in grown:
        if one.use.parent in parents:
            workers.setdefault(one.use.parent, []).append(one)
        else:
            yield _growth_finding(one)
    for parent, children in workers.items():
        yield _growth_finding(children[0]) if len(children) == 1 else _workers_finding(parent, children)


def _growth(points: Points) -> _Grown | None:
    growth = growth_of([(number, use.private_bytes) for number, (_, use) in enumerate(points)])
    if growth is None or not growth.is_steady:
        return None
    begin, end = points[growth.first_step], points[growth.last_step]
    num_between = growth.last_step - growth.first_step
    rate = growth.likely_bytes * num_between / (end[0] - begin[0])
    risen_bytes = end[1].private_bytes - begin[1].private_bytes
    return _Grown(end[1], risen_bytes, rate, (begin[0], end[0]))


def _growth_finding(grown: _Grown) -> Finding:
    return Finding(
        cause="growth",
        title=f"{grown.name[:1].upper()}{grown.name[1:]} grows by "
        f"{format_bytes(round(grown.bytes_per_second))} a second",
        evidence=(_rise(grown),),
        remedy="Look for objects that are kept from step to step: losses or outputs with their graph, lists, caches. "
        "`plimsoll explain` of a run directory names the line that keeps a graph.",
        effect_bytes=grown.risen_bytes,
        effect_known="measured",
        page=_PAGE,
    )


def _workers_finding(parent: int, found: Sequence[_Grown]) -> Finding:
    rate = sum(one.bytes_per_second for one in found)
    return Finding(
        cause="workers_grow",
        title=f"{len(found)} processes that process {parent} started grow by {format_bytes(round(rate))} a second",
        evidence=(
            *map(_rise, found),
            Fact(text="a forked worker copies each page of Python objects that it reads", known="assumed"),
        ),
        remedy="Keep the data set in arrays or files and not in Python objects (`plimsoll data index`), or use fewer "
        "DataLoader workers.",
        effect_bytes=sum(one.risen_bytes for one in found),
        effect_known="measured",
        page=_PAGE,
    )


def _rise(grown: _Grown) -> Fact:
    begin, end = map(format_seconds, grown.seconds)
    text = (
        f"private memory of {grown.name} rose by {format_bytes(grown.risen_bytes)} from {begin} to {end}, to "
        f"{format_bytes(grown.use.private_bytes)}"
    )
    return Fact(text=text, known="measured")


def _killed(record: WatchRecord) -> Iterator[Finding]:
    """Yield a finding if the watch ended in an out-of-memory error, or the kernel killed processes during it."""
    num_kills = _num_kills(record)
    is_end = record.end is not None and record.end.how == "out_of_memory"
    if not is_end and not num_kills:
        return
    facts = [Fact(text=record.end.text, known="measured")] if is_end and record.end is not None else []
    if num_kills:
        killed = f"{num_kills} process{'es' * (num_kills != 1)}"
        facts.append(Fact(text=f"the kernel's counter of OOM kills rose by {killed}", known="measured"))
    limit = _limit_that_killed(record)
    if limit is not None:
        text = f"at the last sample, the limit closest to being reached was {_used(limit)}"
        facts.append(Fact(text=text, known="measured"))
    yield Finding(
        cause="out_of_memory",
        title="Memory ran out",
        evidence=tuple(facts),
        remedy=_REMEDIES[limit.kind if limit is not None else "machine"],
        page=_PAGE,
    )


def _num_kills(record: WatchRecord) -> int:
    return max((sample.num_kills or 0 for sample in record.samples), default=0)


def _limit_that_killed(record: WatchRecord) -> Line | None:
    """Return the limit that probably ended the watched process, or ``None`` if the record has no candidate.

    If the kernel killed it, the limits of control groups and the machine are candidates, otherwise all other limits.
    The fullest candidate is returned.
    """
    is_by_kernel = _num_kills(record) or (record.end is not None and record.end.exit_code == -signal.SIGKILL)
    kinds = {"cgroup", "machine"} if is_by_kernel else {"budget", "data", "address", "gpu"}
    lines = record.samples[-1].lines if record.samples else ()
    return max((line for line in lines if line.kind in kinds), key=lambda line: line.used_share, default=None)


def _reached(record: WatchRecord) -> Iterator[Finding]:
    """Yield a finding for each limit that was reached, or nearly reached."""
    highest: dict[str, tuple[float, Line]] = {}
    warned: dict[str, float] = {}
    for sample in record.samples:
        for line in sample.lines:
            if line.name not in highest or line.used_bytes > highest[line.name][1].used_bytes:
                highest[line.name] = (sample.seconds, line)
            if line.seconds_left is not None:
                warned.setdefault(line.name, sample.seconds)
    has_budget = any(line.kind == "budget" for _, line in highest.values())
    for name, (seconds, line) in highest.items():
        if (has_budget and line.kind in {"budget", "data"}) or (
            line.used_share < _REACHED_SHARE and name not in warned
        ):
            continue
        facts = [Fact(text=f"{_used(line)} after {format_seconds(seconds)}", known="measured")]
        if name in warned:
            facts.append(
                Fact(
                    text=f"from {format_seconds(warned[name])} on, it was expected to be reached within a minute",
                    known="assumed",
                )
            )
        verb = "was reached" if line.used_share >= _REACHED_SHARE else "was near"
        yield Finding(
            cause="limit_reached",
            title=f"A limit {verb}: {name}",
            evidence=tuple(facts),
            remedy=_REMEDIES[line.kind],
            page=_PAGE,
        )


def _swapped(record: WatchRecord) -> Iterator[Finding]:
    highest = max(record.samples, key=_swap_bytes, default=None)
    if highest is None or _swap_bytes(highest) < _FEWEST_SWAP_BYTES:
        return
    size = format_bytes(_swap_bytes(highest))
    text = f"{size} of the watched processes were in swap after {format_seconds(highest.seconds)}"
    yield Finding(
        cause="swap",
        title="Memory was moved to swap",
        evidence=(Fact(text=text, known="measured"),),
        remedy="Free memory on the machine: a step that waits for swap takes many times as long, and only the "
        "machine's limit counts swap.",
        page=_PAGE,
    )


def _swap_bytes(sample: WatchSample) -> int:
    return sum(use.swap_bytes for use in sample.processes)


def _used(line: Line) -> str:
    return f"{line.name}, {format_bytes(line.used_bytes)} of {format_bytes(line.limit_bytes)} ({line.used_share:.0%})"
