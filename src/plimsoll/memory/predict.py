"""Prediction of the memory that a training run needs on a target, from its trace and a model of the target's allocator.

On CUDA, the prediction is the device memory of the process. It consists of the segments that torch's allocator
reserves, simulated over all steps in order and within the limit, and the CUDA context. On the CPU, it is private
memory. It consists of the resident heap of the C library, simulated likewise, the interpreter, the libraries, and the
memory of their threads.

Each estimate states its sources. ``traced`` bytes belong to known storages, and ``modelled`` bytes follow from a model
of an allocator or a library. ``assumed`` bytes come from a table, and ``measured`` bytes were read on this machine. The
range adds up the possible errors of all parts.

Does NOT cover other processes on the same device, and several streams.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plimsoll.memory.allocator import caching
from plimsoll.memory.annotations import private_storages
from plimsoll.memory.heaps import Heaps, steps_of
from plimsoll.memory.library_buffers import deltas_with_workspaces
from plimsoll.memory.live import Column, Live, live_bytes
from plimsoll.records.allocator import AllocatorRules, HeapRules
from plimsoll.records.comparison import Learned
from plimsoll.records.device import DeviceSpec
from plimsoll.records.prediction import Estimate, Holding, MemoryTimeline, Moment
from plimsoll.records.trace import Category, Trace

MOST_ROWS = 4000
_NUM_LARGEST = 10
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

# The remaining error of predictions. On CUDA it is at most 0.7 % of allocated memory, and 2 % of reserved memory in 98
# of 100 runs (benchmarks/predict_gpu_recordings.py). On the CPU it is 1.3 %, and 4.4 % inside a budget
# (benchmarks/predict_cpu_rss.py).
_CUDA_SPREAD = 0.02
_CPU_SPREAD = 0.06
# A heap that keeps large blocks has large holes, whose positions depend on chance. In 12 to 60 steps of five models,
# the heap took up to 6 times the largest block more than in two simulated steps. Compared with nine simulated steps, it
# took up to 2.4 times that block less (docs/LOG.md).
_HOLES_LESS, _HOLES_MORE = 3, 5
_UNKNOWN_CONTEXT_BYTES = (200 << 20, 816 << 20)  # range over the measured cards of the table


@dataclass(frozen=True)
class Counted:
    """Predicted memory of a trace on a target. The columns have a row for each event of `live`.

    Attributes:
        trace: the trace.
        live: live bytes of the trace.
        allocated: bytes in use by tensors, without ``fixed``.
        reserved: bytes held by the process, with ``fixed``.
        fixed: memory that exists from the start, by category.
        spread: relative error of the prediction.
        oom_row: the event that does not fit within the limit; the columns then show the run without a limit.
        learned: ratio of measured to predicted live bytes in earlier runs. It widens the range of the prediction but
            does not change the likely value.
        unwritten_bytes: bytes beyond the peak that a limit on address space (see `plimsoll.device.cpu.data_limit`) must
            allow: memory that is never written, and heap holes whose pages were released.
        holes_bytes: bytes by which heap holes may be smaller and larger than simulated, if the heap keeps large blocks.
        gives_back: whether freed memory is returned to the system, so that its pages are new when it is allocated
            again.
        workspaces_bytes: bytes of cuBLAS workspaces. torch counts workspaces as allocated; here they belong to the
            context from the start.
        most_in_use_bytes: peak of torch's counter of allocated bytes, which may occur before all workspaces exist.
            ``None`` on the CPU, which has no such counter.
    """

    trace: Trace
    live: Live
    allocated: Column
    reserved: Column
    fixed: dict[Category, Estimate]
    spread: float
    oom_row: int | None = None
    learned: Learned | None = None
    unwritten_bytes: int = 0
    holes_bytes: tuple[int, int] = (0, 0)
    gives_back: bool = False
    workspaces_bytes: int = 0
    most_in_use_bytes: int | None = None

    @cached_property
    def fresh_bytes(self) -> dict[int, int]:
        """Bytes of memory that the process takes from the system in every step, by the row of the op that takes them.

        Empty if the process returns no memory to the system, because it then stops growing after its first steps.
        """
        found: dict[int, int] = {}
        if self.gives_back:
            grown = np.diff(self.reserved, prepend=self.reserved[:1])
            ops = np.asarray(self.trace.event_op, dtype=np.int64)[self.live.event]
            for op, num_bytes in zip(ops[grown > 0].tolist(), grown[grown > 0].tolist(), strict=True):
                found[op] = found.get(op, 0) + num_bytes
        return found

    @cached_property
    def peak_row(self) -> int:
        """Row at which the most bytes are alive."""
        return self.live.peak_row

    @cached_property
    def peak(self) -> Estimate:
        """Peak memory of the process, with its range."""
        return self.most_reserved + self.fixed_part

    @cached_property
    def most_reserved(self) -> Estimate:
        """Peak of the allocator's memory, with workspaces. On CUDA it predicts torch's counter of reserved bytes."""
        own_bytes = int(self.reserved.max(initial=0)) - sum(self._standing_bytes.values())
        traced_bytes = min(int(self.live.total[self.peak_row]), own_bytes)
        own = Estimate(
            likely_bytes=own_bytes,
            low_bytes=max(self._low(own_bytes) - self.holes_bytes[0], min(self._low(own_bytes), traced_bytes)),
            high_bytes=self._high(own_bytes) + self.unwritten_bytes + self.holes_bytes[1],
            traced_bytes=traced_bytes,
            modelled_bytes=own_bytes - traced_bytes,
        )
        return own + _exactly(self.workspaces_bytes, modelled_bytes=self.workspaces_bytes)

    @property
    def fixed_part(self) -> Estimate:
        """Memory outside the allocator, which exists from the start."""
        return sum(self.fixed.values(), start=_exactly(0))

    @cached_property
    def most_allocated(self) -> Estimate:
        """Peak of allocated bytes. On CUDA it predicts torch's counter of allocated bytes."""
        own_bytes = int(self.allocated.max(initial=0))
        likely_bytes = own_bytes if self.most_in_use_bytes is None else self.most_in_use_bytes
        traced_bytes, workspaces_bytes = min(self.live.peak_bytes, likely_bytes), likely_bytes - own_bytes
        return Estimate(
            likely_bytes=likely_bytes,
            low_bytes=self._low(own_bytes) + workspaces_bytes,
            high_bytes=self._high(own_bytes) + workspaces_bytes,
            traced_bytes=traced_bytes,
            modelled_bytes=likely_bytes - traced_bytes,
        )

    @property
    def _standing_bytes(self) -> dict[Category, int]:
        """Memory that exists from the start, in bytes by category, with cuBLAS workspaces as part of the context."""
        sizes = {name: part.likely_bytes for name, part in self.fixed.items()}
        return sizes | ({"context": sizes["context"] + self.workspaces_bytes} if self.workspaces_bytes else {})

    def parts(self) -> dict[Category, int]:
        """Return the bytes of each category at the peak of live bytes; other bytes count as fragmentation."""
        row = self.peak_row
        parts = {name: int(column[row]) for name, column in self.live.by_category.items() if column[row]}
        for name, num_bytes in self._standing_bytes.items():
            parts[name] = parts.get(name, 0) + num_bytes
        parts["fragmentation"] = self.peak.likely_bytes - sum(parts.values())
        return {name: size for name, size in parts.items() if size}

    def moment(self, event: int) -> Moment:
        """Return the step, phase, op and code location of an event of the trace."""
        return moment_of(self.trace, self.trace.event_op[event])

    def peak_moment(self) -> Moment:
        """Return the step, phase, op and code location of the peak."""
        return self.moment(int(self.live.event[self.peak_row]))

    def oom_moment(self) -> Moment | None:
        """Return the step, phase, op and code location at which the allocator ran out of memory, or ``None``."""
        return None if self.oom_row is None else self.moment(int(self.live.event[self.oom_row]))

    def largest(self) -> tuple[Holding, ...]:
        """Return the largest groups of similar storages that are alive at the peak, in descending order of size."""
        storages, texts = self.trace.storages, self.trace.texts
        groups: dict[tuple[str, ...], list[int]] = {}
        for storage in self.live.alive_at(self.peak_row):
            made = moment_of(self.trace, storages.born[storage])
            name = texts[storages.name[storage]] or made.module
            key = (storages.category[storage], texts[storages.shape[storage]], made.line, _NUMBER.sub("*", name))
            groups.setdefault(key, []).append(storage)
        sizes = {key: sum(storages.num_bytes[storage] for storage in group) for key, group in groups.items()}
        return tuple(
            self._holding(groups[key], sizes[key], key[3])
            for key in sorted(groups, key=lambda key: -sizes[key])[:_NUM_LARGEST]
        )

    def _holding(self, group: list[int], num_bytes: int, pattern: str) -> Holding:
        storages, texts = self.trace.storages, self.trace.texts
        made = moment_of(self.trace, storages.born[group[0]])
        name = texts[storages.name[group[0]]]
        if len(group) > 1:
            name, made = (pattern, made) if name else ("", made.model_copy(update={"module": pattern}))
        return Holding(
            num_bytes=num_bytes,
            count=len(group),
            category=storages.category[group[0]],
            shape=texts[storages.shape[group[0]]],
            name=name,
            made=made,
        )

    def timeline(self) -> MemoryTimeline:
        """Return live and reserved bytes over time, reduced to the peaks and to the extremes of equal intervals."""
        rows = _thinned(self.live.total, self.peak_row, int(self.reserved.argmax()) if len(self.reserved) else -1)
        ops = [self.trace.event_op[event] for event in self.live.event[rows].tolist()]
        table, texts = self.trace.ops, self.trace.texts
        fixed_bytes = sum(self._standing_bytes.values())
        categories: dict[Category, tuple[int, ...]] = {
            name: (num_bytes,) * len(rows) for name, num_bytes in self._standing_bytes.items()
        }
        for name, column in self.live.by_category.items():
            categories[name] = tuple(column[rows].tolist())
        return MemoryTimeline(
            source=self.trace.source,
            phase=tuple(table.phase[op] for op in ops),
            step=tuple(table.step[op] for op in ops),
            label=tuple(f"{_short(texts[table.name[op]])} {texts[table.module[op]]}".strip() for op in ops),
            categories=categories,
            used_bytes=tuple((self.live.total[rows] + fixed_bytes).tolist()),
            reserved_bytes=tuple(self.reserved[rows].tolist()),
            peak_row=int(np.searchsorted(rows, self.peak_row)),
        )

    def _low(self, likely_bytes: int) -> int:
        assumed = sum(assumption.low_bytes for assumption in self.trace.assumptions)
        learned = min(1.0, self.learned.low) if self.learned else 1.0
        return max(0, int(likely_bytes * learned * (1 - self.spread)) + assumed)

    def _high(self, likely_bytes: int) -> int:
        assumed = sum(assumption.high_bytes for assumption in self.trace.assumptions)
        learned = max(1.0, self.learned.high) if self.learned else 1.0
        return int(likely_bytes * learned * (1 + self.spread)) + assumed


def count_on_cuda(
    trace: Trace,
    spec: DeviceSpec,
    limit_bytes: int | None = None,
    rules: AllocatorRules | None = None,
    beside: Estimate | None = None,
) -> Counted:
    """Predict the memory of a trace on a GPU: simulate torch's caching allocator, and add the CUDA context.

    Args:
        trace: the trace, lowered to the card's architecture.
        spec: the card.
        limit_bytes: device memory that the process may use, context included; ``None`` for no limit.
        rules: configuration of the allocator; ``None`` for torch's defaults.
        beside: device memory in bytes that libraries use outside the allocator, in addition to the context.
    """
    context = context_of(spec) if beside is None else context_of(spec) + beside
    live = live_bytes(trace)
    private = private_storages(trace)
    deltas = list(deltas_with_workspaces(trace, spec.cublas_workspace_bytes or 0, private=private))
    is_traced = np.asarray([storage < len(trace.storages.num_bytes) for storage, _ in deltas], dtype=bool)
    workspaces_bytes = sum(num_bytes for (_, num_bytes), traced in zip(deltas, is_traced, strict=True) if not traced)
    replayed = caching.replay(deltas, caching.CachingAllocator(rules), private=private)
    oom_row = None
    if limit_bytes is not None and replayed.peak_reserved_bytes > limit_bytes - context.likely_bytes:
        # Near the limit, the allocator releases cached segments. More fits than the simulation without a limit
        # reserves.
        within = caching.CachingAllocator(rules, max(limit_bytes - context.likely_bytes, 1))
        limited = caching.replay(deltas, within, private=private)
        if limited.oom_at is None:
            replayed = limited
        else:
            oom_row = max(int(is_traced[: limited.oom_at + 1].sum()) - 1, 0)
    # Workspaces count as fixed even before the first matrix product allocates them.
    missing = workspaces_bytes - np.cumsum([0 if t else b for (_, b), t in zip(deltas, is_traced, strict=True)])
    allocated = np.asarray(replayed.allocated_bytes, dtype=np.int64) + missing - workspaces_bytes
    reserved = np.maximum(np.asarray(replayed.reserved_bytes, dtype=np.int64), allocated + workspaces_bytes)
    return Counted(
        trace=trace,
        live=live,
        allocated=allocated[is_traced],
        reserved=reserved[is_traced] + context.likely_bytes,
        fixed={"context": context},
        spread=_CUDA_SPREAD,
        oom_row=oom_row,
        workspaces_bytes=workspaces_bytes,
        most_in_use_bytes=replayed.peak_allocated_bytes,
    )


def count_on_cpu(  # noqa: PLR0917 -- the last three are given by name
    trace: Trace,
    baseline: Estimate,
    rules: HeapRules,
    has_limit: bool = False,
    is_long: bool = False,
    heaps: Heaps | None = None,
) -> Counted:
    """Predict the memory of a trace on the CPU: simulate the heap of the C library, and add ``baseline``.

    Args:
        trace: the trace, lowered to the CPU.
        baseline: memory of the process before training: the interpreter, the libraries, and their threads.
        rules: configuration of the heap.
        has_limit: whether the training runs inside `plimsoll.device.cpu.data_limit`, which also counts memory that is
            never written.
        is_long: whether to simulate steps after the traced ones, if the heap keeps large blocks.
        heaps: cache of earlier replays, for a trace that is counted in several heaps; this replay is added to the
            cache.
    """
    replayed = (heaps or Heaps()).replay(trace, rules, is_long)
    written, live, resident = replayed.written, replayed.live, replayed.resident
    limited = (replayed.address + _never_written(trace, live)).max(initial=0) if has_limit else 0
    return Counted(
        trace=written,
        live=live,
        allocated=live.total,
        reserved=resident + baseline.likely_bytes,
        fixed={"baseline": baseline},
        spread=_CPU_SPREAD,
        unwritten_bytes=max(0, int(limited - resident.max(initial=0))),
        holes_bytes=_chance_of_holes(written, live, rules) if rules.keeps_large else (0, 0),
        gives_back=rules.gives_back,
    )


def _never_written(asked: Trace, live: Live) -> Column:
    """Return the bytes allocated but never written after each event; ``asked`` is the trace with allocated sizes."""
    num_bytes = np.asarray(asked.storages.num_bytes, dtype=np.int64)[live.storage]
    return np.cumsum(np.sign(live.delta) * (num_bytes - np.abs(live.delta)))


def _chance_of_holes(trace: Trace, live: Live, rules: HeapRules) -> tuple[int, int]:
    """Return by how many bytes heap holes may be smaller and larger: multiples of the largest freed heap block."""
    freed = -live.delta[(live.delta < 0) & (steps_of(trace, live) > 0)]
    largest_bytes = int(freed[freed < rules.mmap_threshold_bytes].max(initial=0))
    return _HOLES_LESS * largest_bytes, _HOLES_MORE * largest_bytes


def context_of(spec: DeviceSpec) -> Estimate:
    """Return the device memory of a CUDA context, which the driver uses for each process outside torch's allocator."""
    low_bytes, high_bytes = _UNKNOWN_CONTEXT_BYTES
    if spec.context_low_bytes is not None and spec.context_high_bytes is not None:
        low_bytes, high_bytes = spec.context_low_bytes, spec.context_high_bytes
    likely_bytes = (low_bytes + high_bytes) // 2
    return Estimate(likely_bytes=likely_bytes, low_bytes=low_bytes, high_bytes=high_bytes, assumed_bytes=likely_bytes)


def moment_of(trace: Trace, op: int) -> Moment:
    """Return the step, phase, op and code location of an op of the trace."""
    table, texts = trace.ops, trace.texts
    return Moment(
        step=table.step[op],
        phase=table.phase[op],
        op=_short(texts[table.name[op]]),
        module=texts[table.module[op]],
        line=texts[table.line[op]],
    )


def _short(op: str) -> str:
    """Return the short name of an op, ``add`` for ``aten.add.Tensor``."""
    parts = op.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else op


def _exactly(num_bytes: int, **known_how: int) -> Estimate:
    return Estimate(likely_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes, **known_how)


def _thinned(total: Column, *peak_rows: int) -> Column:
    """Return at most about `MOST_ROWS` rows of a column, sorted: the extremes of intervals, and ``peak_rows``."""
    num_rows = len(total)
    if num_rows <= MOST_ROWS:
        return np.arange(num_rows)
    stretch = -(-2 * num_rows // MOST_ROWS)
    kept = {0, num_rows - 1, *peak_rows}
    for start in range(0, num_rows, stretch):
        part = total[start : start + stretch]
        kept |= {start + int(part.argmax()), start + int(part.argmin())}
    return np.asarray(sorted(kept))
