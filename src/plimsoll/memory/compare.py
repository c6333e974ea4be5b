"""Comparison of a predicted trace with a measured one, op by op, and calibration of a target from its runs.

    comparison = compare(predicted, measured)
    calibrate(Calibration(), comparison).save(path)

The peak counts live bytes of storages on the device, as the recorder sees them. Only a prediction contains scratch
memory of kernels, so this memory is ignored. The overhead of the allocator is known only from its counters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

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
_SCRATCH = "scratch of the kernel"  # the recorder's text in place of a shape
_Key = tuple[str, str, Category]  # op, module, category


def compare(predicted: Trace, measured: Trace, counters: Counters | None = None) -> Comparison:
    """Compare a predicted and a measured trace of the same training.

    Args:
        predicted: the trace on fake tensors.
        measured: the recorded run.
        counters: memory counters of the device in that run.
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
    """Return a calibration updated with one more run, or the same one if a trace has no memory on the device."""
    live, predicted = comparison.measured.peak_bytes, comparison.predicted.peak_bytes
    if not live or not predicted:
        return calibration
    old, counters = calibration.targets.get(comparison.lowered_to, Target()), comparison.counters
    learned = {"live_ratio": with_run(old.live_ratio, live / predicted)}
    if counters is not None:
        learned["baseline_bytes"] = with_run(old.baseline_bytes, float(counters.baseline_bytes))
        learned["beyond_ratio"] = with_run(old.beyond_ratio, (counters.peak_bytes - counters.baseline_bytes) / live)
    target = old.model_copy(update=learned)
    return Calibration(targets={**calibration.targets, comparison.lowered_to: target})


def _without_scratch(trace: Trace) -> Trace:
    number, shapes = dict(zip(trace.texts, range(len(trace.texts)), strict=True)).get(_SCRATCH), trace.storages.shape
    kept = [event for event, signed in enumerate(trace.events) if shapes[abs(signed) - 1] != number]
    columns = {name: tuple(getattr(trace, name)[event] for event in kept) for name in ("events", "event_op")}
    return trace.model_copy(update=columns)


def with_run(old: Learned | None, value: float) -> Learned:
    """Return the statistics of a learned value, updated with one more run; ``old`` is ``None`` before the first run."""
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
    """Return the peak of a trace, and the bytes that are live at the peak by op, module and category.

    The op and module of a storage are those that made it.
    """
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
    """Yield ops, in order, that allocate or free differently in the two traces, or exist in only one trace."""
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
    """Return, for each op, the storages that were allocated and freed from its start until the next op."""
    found: dict[int | None, tuple[_Sizes, _Sizes]] = {}
    storages, texts = trace.storages, trace.texts
    for signed, op_row in zip(trace.events, trace.event_op, strict=True):
        storage = abs(signed) - 1
        block = storages.num_bytes[storage], texts[storages.shape[storage]]
        found.setdefault(op_row, ([], []))[signed < 0].append(block)
    return found


def _blocks(sizes: Counter[tuple[int, str]]) -> tuple[Block, ...]:
    return tuple(Block(num_bytes=num_bytes, shape=shape) for num_bytes, shape in sizes.elements())


Pair = tuple[int | None, int | None]
"""Rows of the same op in two traces; ``None`` if only the other trace has the op."""

_NUM_IN_A_ROW = 3  # equal ops in a row, after which two positions count as the same
_MOST_SKIPPED = 500  # ops of both traces together


def align(one: Trace, other: Trace) -> Iterator[Pair]:
    """Yield pairs of rows of the same op in two traces, in order.

    Two runs of the same training usually have the same ops. Otherwise, the ops of each section of a step and phase are
    matched from the front and from the back. After a difference, matching continues at the next position at which a few
    ops in a row agree. If this would skip `_MOST_SKIPPED` ops or more, only the ops at the back are still matched. This
    method does not find the longest common sequence.
    """
    names, other_names = _names(one), _names(other)
    others = dict(_parts(other))
    for key, (start, end) in _parts(one):
        other_start, other_end = others.pop(key, (0, 0))
        for place, other_place in _matched(names[start:end], other_names[other_start:other_end]):
            yield (
                None if place is None else start + place,
                None if other_place is None else other_start + other_place,
            )
    for start, end in others.values():
        yield from ((None, row) for row in range(start, end))


def _names(trace: Trace) -> list[str]:
    return [trace.texts[number] for number in trace.ops.name]


def _parts(trace: Trace) -> Iterator[tuple[tuple[int, str, int], tuple[int, int]]]:
    """Yield sections of one step and phase as ``(step, phase, occurrence), (first row, row after the last)``."""
    start, seen = 0, dict[tuple[int, str], int]()
    for step_and_phase, rows in groupby(zip(trace.ops.step, trace.ops.phase, strict=True)):
        number = seen[step_and_phase] = seen.get(step_and_phase, 0) + 1
        end = start + sum(1 for _ in rows)
        yield (*step_and_phase, number), (start, end)
        start = end


def _matched(a: list[str], b: list[str]) -> Iterator[Pair]:
    """Yield aligned positions in two lists of names; ``None`` replaces the position in a list that lacks the name."""
    tail = 0
    while tail < min(len(a), len(b)) and a[-tail - 1] == b[-tail - 1]:
        tail += 1
    i, j, i_end, j_end = 0, 0, len(a) - tail, len(b) - tail
    places = _places_by_next_names(b, j_end)
    while i < i_end or j < j_end:
        if i < i_end and j < j_end and a[i] == b[j]:
            yield i, j
            i, j = i + 1, j + 1
            continue
        i_next, j_next = _next_alike(a, places, (i, j), (i_end, j_end))
        yield from ((place, None) for place in range(i, i_next))
        yield from ((None, place) for place in range(j, j_next))
        i, j = i_next, j_next
    yield from zip(range(i_end, len(a)), range(j_end, len(b)), strict=True)


def _places_by_next_names(names: list[str], end: int) -> dict[tuple[str, ...], list[int]]:
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(end):
        places.setdefault(tuple(names[place : place + _NUM_IN_A_ROW]), []).append(place)
    return places


def _next_alike(
    a: list[str], places: dict[tuple[str, ...], list[int]], start: tuple[int, int], end: tuple[int, int]
) -> tuple[int, int]:
    """Return the next positions in both lists at which three names in a row agree, with the fewest names skipped.

    ``places`` has the positions in the second list, by the three names. If `_MOST_SKIPPED` or more names would be
    skipped, return ``end``.
    """
    best, num_skipped = end, _MOST_SKIPPED
    for i in range(start[0], min(end[0], start[0] + _MOST_SKIPPED)):
        if i - start[0] >= num_skipped:
            break
        found = places.get(tuple(a[i : i + _NUM_IN_A_ROW]), [])
        nearest = bisect_left(found, start[1])
        if nearest < len(found) and i - start[0] + found[nearest] - start[1] < num_skipped:
            best, num_skipped = (i, found[nearest]), i - start[0] + found[nearest] - start[1]
    return best
