"""A predicted trace against a measured one, op by op, and what a target's runs teach.

    comparison = compare(predicted, measured)
    calibrate(Calibration(), comparison).save(path)

The peak is that of live bytes: storages, as the recorder sees them, in one place (the device). What kernels take while
they run is in a prediction only, and is left out. What an allocator makes of it all is known from the counters only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from plimsoll.memory.align import align
from plimsoll.memory.live import live_bytes
from plimsoll.records.comparison import (
    Block,
    Calibration,
    Comparison,
    Counters,
    Difference,
    Group,
    Learned,
    Side,
    Target,
)
from plimsoll.records.prediction import Moment
from plimsoll.records.trace import Category, Trace

_MOST_GROUPS = 20
_SCRATCH = "scratch of the kernel"  # what the recorder says in place of a shape
_Key = tuple[str, str, Category]  # op, module, category


def compare(predicted: Trace, measured: Trace, counters: Counters | None = None) -> Comparison:
    """Compare two traces of the same training.

    Args:
        predicted: the trace of fake tensors.
        measured: the recorded run.
        counters: what the device counted in that run.
    """
    predicted = _without_scratch(predicted)
    differences = list(_differences(predicted, measured))
    (side, alive), (other_side, other_alive) = _peak(predicted), _peak(measured)
    groups = [
        Group(op=op, module=module, category=category, predicted_bytes=expected, measured_bytes=found)
        for op, module, category in {**alive, **other_alive}
        if (expected := alive[op, module, category]) != (found := other_alive[op, module, category])
    ]
    groups.sort(key=lambda group: -abs(group.difference_bytes))
    return Comparison(
        lowered_to=predicted.lowered_to,
        predicted=side,
        measured=other_side,
        num_ops=len(predicted.ops.name),
        num_differing_ops=len(differences),
        first=differences[0] if differences else None,
        groups=tuple(groups[:_MOST_GROUPS]),
        num_groups=len(groups),
        counters=counters,
    )


def calibrate(calibration: Calibration, comparison: Comparison) -> Calibration:
    """Return what is known with one more run; a run that measured nothing teaches nothing."""
    live, predicted = comparison.measured.peak_bytes, comparison.predicted.peak_bytes
    if not live or not predicted:
        return calibration
    old, counters = calibration.targets.get(comparison.lowered_to, Target()), comparison.counters
    baseline = beyond = None
    if counters is not None:
        baseline, beyond = float(counters.baseline_bytes), (counters.peak_bytes - counters.baseline_bytes) / live
    learned = {
        "live_ratio": _with_run(old.live_ratio, live / predicted),
        "baseline_bytes": _with_run(old.baseline_bytes, baseline),
        "beyond_ratio": _with_run(old.beyond_ratio, beyond),
    }
    target = old.model_copy(update=learned)
    return Calibration(targets={**calibration.targets, comparison.lowered_to: target})


def _without_scratch(trace: Trace) -> Trace:
    number, shapes = dict(zip(trace.texts, range(len(trace.texts)), strict=True)).get(_SCRATCH), trace.storages.shape
    kept = [event for event, signed in enumerate(trace.events) if shapes[abs(signed) - 1] != number]
    columns = {name: tuple(getattr(trace, name)[event] for event in kept) for name in ("events", "event_op")}
    return trace.model_copy(update=columns)


def _with_run(old: Learned | None, value: float | None) -> Learned | None:
    if value is None:
        return old
    return Learned(num_runs=1, mean=value, low=value, high=value) if old is None else old.with_run(value)


def _moment(trace: Trace, row: int) -> Moment:
    ops, texts = trace.ops, trace.texts
    if not ops.name:
        return Moment(step=0, phase="setup", op="", module="", line="")
    return Moment(
        step=ops.step[row],
        phase=ops.phase[row],
        op=texts[ops.name[row]],
        module=texts[ops.module[row]],
        line=texts[ops.line[row]],
    )


def _peak(trace: Trace) -> tuple[Side, Counter[_Key]]:
    """The peak of a trace, and what is alive at it by the op and module that made it and its category."""
    live = live_bytes(trace)
    row = live.peak_row
    op_row = trace.event_op[int(live.event[row])] if row >= 0 else 0
    alive: Counter[_Key] = Counter()
    parts: Counter[Category] = Counter()
    storages = trace.storages
    for storage in live.alive_at(row) if row >= 0 else ():
        made = _moment(trace, storages.born[storage])
        alive[made.op, made.module, storages.category[storage]] += storages.num_bytes[storage]
        parts[storages.category[storage]] += storages.num_bytes[storage]
    return Side(peak_bytes=live.peak_bytes, parts=dict(parts), moment=_moment(trace, op_row)), alive


def _differences(predicted: Trace, measured: Trace) -> Iterator[Difference]:
    """Ops that are in one trace only and allocate or free, or that do so otherwise, in order."""
    events, other_events = _events_by_op(predicted), _events_by_op(measured)
    for row, other_row in align(predicted, measured):
        born, died = events.get(row, _NOTHING)
        other_born, other_died = other_events.get(other_row, _NOTHING)
        if sorted(born) == sorted(other_born) and sorted(died) == sorted(other_died):
            continue
        trace, place = (predicted, row) if row is not None else (measured, other_row)
        assert place is not None
        yield Difference(
            row=place,
            moment=_moment(trace, place),
            is_predicted=row is not None,
            is_measured=other_row is not None,
            only_predicted=_blocks(Counter(born) - Counter(other_born)),
            only_measured=_blocks(Counter(other_born) - Counter(born)),
            freed_only_predicted=_blocks(Counter(died) - Counter(other_died)),
            freed_only_measured=_blocks(Counter(other_died) - Counter(died)),
        )


_Sizes = list[tuple[int, str]]
_NOTHING: tuple[_Sizes, _Sizes] = ([], [])


def _events_by_op(trace: Trace) -> dict[int | None, tuple[_Sizes, _Sizes]]:
    """The storages that were born and that died while each op ran, or before the next one."""
    found: dict[int | None, tuple[_Sizes, _Sizes]] = {}
    storages, texts = trace.storages, trace.texts
    for signed, op_row in zip(trace.events, trace.event_op, strict=True):
        storage = abs(signed) - 1
        block = storages.num_bytes[storage], texts[storages.shape[storage]]
        found.setdefault(op_row, ([], []))[signed < 0].append(block)
    return found


def _blocks(sizes: Counter[tuple[int, str]]) -> tuple[Block, ...]:
    return tuple(Block(num_bytes=num_bytes, shape=shape) for num_bytes, shape in sizes.elements())
