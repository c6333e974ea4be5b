"""Replays of traces in heaps of the C library, event by event.

A plan evaluates each trace in several heaps, in some of them repeatedly. The heap calls of a trace are therefore listed
once, and replays are cached. A heap that would behave the same at every call is not replayed. For example, mapping
blocks from 32 MiB on and never mapping are equivalent if all blocks are smaller.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from plimsoll.memory.allocator.glibc import HeapReplay, replay
from plimsoll.memory.allocator.heap_calls import TENSOR_OBJECTS_BYTES, HeapCalls, heap_calls
from plimsoll.memory.live import Column, Live, live_bytes
from plimsoll.records.allocator import HeapRules
from plimsoll.records.trace import Trace

_MOST_LATER_STEPS, _MOST_LATER_EVENTS = 8, 40_000  # the heap hardly grows after these steps and events


class InHeap(NamedTuple):
    """The result of replaying a trace in a heap of the C library.

    ``written`` is the trace without memory that is never written, and ``live`` its live bytes. ``resident`` has the
    resident bytes of the heap for each row of ``live``. If a row is repeated in later steps, its entry is the maximum.
    """

    written: Trace
    live: Live
    resident: Column
    address: Column
    """Bytes that a limit on address space counts: the heap with its holes, resident or not."""


class Heaps:
    """Cache of the replays of traces in heaps. It keeps the traces alive."""

    def __init__(self) -> None:
        self._of: dict[int, _Traced] = {}  # by the id of a trace

    def replay(self, trace: Trace, rules: HeapRules, is_long: bool = False) -> InHeap:
        """Return the replay of a trace in a heap.

        Args:
            trace: the trace, lowered to the CPU.
            rules: configuration of the heap.
            is_long: whether to repeat the last step after the trace, if the heap keeps large freed blocks.
        """
        if id(trace) not in self._of:
            self._of[id(trace)] = _Traced(trace)
        return self._of[id(trace)].replay(rules, is_long and rules.keeps_large)


class _Traced:
    """A trace, with its replays in all heaps so far."""

    def __init__(self, trace: Trace) -> None:
        self._asked = trace  # keeps the trace, and with it the id, alive
        self._written = _as_written(trace)
        self._live = live_bytes(self._written)
        self._calls: dict[Hashable, HeapCalls] = {}
        self._replays: dict[Hashable, list[HeapReplay]] = {}

    def replay(self, rules: HeapRules, is_long: bool) -> InHeap:
        thresholds = _thresholds(self._written, self._live, rules)
        later = _later(self._written, self._live) if is_long else _NO_STEPS
        key = later.times, rules.trims_after_steps, tuple(thresholds.items())
        if key not in self._calls:
            self._calls[key] = self._listed(rules.trims_after_steps, thresholds, later)
        replays = self._replays.setdefault(key, [])
        replayed = next((one for one in replays if one.is_as_with(rules)), None)
        if replayed is None:
            replayed = replay(self._calls[key], rules)
            replays.append(replayed)
        resident, address = map(later.highest, (replayed.resident_bytes, replayed.address_bytes))
        return InHeap(self._written, self._live, resident, address)

    def _listed(self, trims_after_steps: bool, thresholds: dict[int, int], later: _Steps) -> HeapCalls:
        written, live, num_rows = self._written, self._live, len(self._live.delta)
        rows = np.concatenate([np.arange(num_rows), np.tile(later.rows, later.times)])
        begins = [num_rows + number * len(later.rows) for number in range(later.times)]
        changes = {begin + row: change for begin in begins for row, change in later.nodes.items()}
        return heap_calls(
            zip(live.storage[rows].tolist(), live.delta[rows].tolist(), strict=True),
            beside_bytes=TENSOR_OBJECTS_BYTES,
            trims_before=_first_rows_of_steps(written, live).union(begins) if trims_after_steps else (),
            nodes_before=_node_changes(written, live) | changes,
            thresholds_before=thresholds,
        )


class _Steps(NamedTuple):
    """Repetitions of the last step, to replay after the trace.

    ``rows`` are the rows that are repeated ``times`` times. ``nodes`` has the changes of the number of autograd nodes,
    by the index in ``rows``.
    """

    rows: Column
    nodes: dict[int, int]
    times: int

    def highest(self, column: Column) -> Column:
        """Return a column without the rows of the repetitions; a repeated row has the maximum over its repetitions."""
        num_later = self.times * len(self.rows)
        highest = column[: len(column) - num_later].copy()
        np.maximum.at(highest, np.tile(self.rows, self.times), column[len(highest) :])
        return highest


_NO_STEPS = _Steps(np.arange(0), {}, 0)


def _later(trace: Trace, live: Live) -> _Steps:
    """Return repetitions of the last step, restricted to storages that are made and freed within it.

    A heap that keeps freed memory grows for some steps. If a large block finds no hole, the heap takes new memory, and
    the holes change.
    """
    steps = steps_of(trace, live)
    is_last = steps == steps.max(initial=0)
    born, died = (live.storage[is_last & (sign * live.delta > 0)] for sign in (1, -1))
    rows = np.flatnonzero(is_last & np.isin(live.storage, np.intersect1d(born, died)))
    if not len(rows):
        return _NO_STEPS
    first = int(np.asarray(trace.event_op)[live.event[rows[0]]])
    within = tuple(node for node in trace.nodes if node[0] >= first and node[1] >= 0)
    changes = _node_changes(trace.model_copy(update={"nodes": within}), live)
    nodes: dict[int, int] = {}
    for row, change in changes.items():
        before = min(int(np.searchsorted(rows, row)), len(rows) - 1)
        nodes[before] = nodes.get(before, 0) + change
    return _Steps(rows, nodes, min(_MOST_LATER_STEPS, _MOST_LATER_EVENTS // len(rows)))


def steps_of(trace: Trace, live: Live) -> Column:
    """Return the step of each row; 0 is before the first step."""
    return np.asarray(trace.ops.step, dtype=np.int64)[np.asarray(trace.event_op, dtype=np.int64)[live.event]]


def _first_rows_of_steps(trace: Trace, live: Live) -> frozenset[int]:
    """Return the first row of each step except step 1."""
    steps = steps_of(trace, live)
    begins = np.flatnonzero((steps[1:] > steps[:-1]) & (steps[:-1] > 0)) + 1
    return frozenset(begins.tolist())


def _thresholds(trace: Trace, live: Live, rules: HeapRules) -> dict[int, int]:
    """Return mmap thresholds by the row from which each applies: during model construction, and from step 1 on."""
    if rules.build_threshold_bytes is None:
        return {}
    first = int(np.searchsorted(steps_of(trace, live) > 0, True))
    return {first: rules.mmap_threshold_bytes} | ({0: rules.build_threshold_bytes} if first else {})


def _as_written(trace: Trace) -> Trace:
    """Return the trace without memory that is never written and so never resident."""
    if not trace.unwritten:
        return trace
    num_bytes = list(trace.storages.num_bytes)
    for storage, unwritten_bytes in trace.unwritten:
        num_bytes[storage] -= unwritten_bytes
    return trace.model_copy(update={"storages": trace.storages.model_copy(update={"num_bytes": tuple(num_bytes)})})


def _node_changes(trace: Trace, live: Live) -> dict[int, int]:
    """Return, by row, the net change in the number of autograd nodes before the row, where it is not 0."""
    made, gone, numbers = np.asarray(trace.nodes, dtype=np.int64).reshape(-1, 3).T
    ops = np.asarray(trace.event_op, dtype=np.int64)[live.event]
    changes = np.zeros(len(ops) + 1, dtype=np.int64)
    np.add.at(changes, np.searchsorted(ops, made), numbers)
    ends = gone >= 0
    np.subtract.at(changes, np.searchsorted(ops, gone[ends]), numbers[ends])
    rows = np.flatnonzero(changes[:-1])
    return dict(zip(rows.tolist(), changes[rows].tolist(), strict=True))
