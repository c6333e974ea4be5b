"""The calls that a training run makes to the C library's heap, derived from births and deaths of storages in a trace.

A tensor is more than its data: torch allocates small blocks for each tensor, and autograd for each graph node. The
calls do not depend on the configuration of the heap. One list therefore serves every heap in which a trace is replayed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

MALLOC, MEMALIGN, FREE, ROW, TRIM, MAP_FROM = range(6)
"""Kinds of calls. A ``ROW`` is not a call: it marks the end of a delta, after which resident bytes are recorded."""

TENSOR_OBJECTS_BYTES = (96, 176, 24)
"""Sizes of the small blocks that torch allocates for a tensor: for the storage, the tensor, and its shape.

The first is allocated before the data, the others after it. They are freed in this order: shape, data, storage, tensor.
Sizes and order were measured by wrapping malloc in GPT-2, BERT and GRU steps (torch 2.13). The order matters: freed
data may be followed by two blocks of a live tensor. With all three blocks after the data, the replayed heap of a
6-layer GPT-2 (which keeps freed blocks) was 7 % smaller than the recorded one.
"""

NODE_OBJECTS_BYTES = (
    (16, 16, 24, 32, 488),
    (16, 16, 24, 184, 552),
    (16, 16, 24, 32, 176, 464),
    (16, 16, 24, 24, 312, 64, 640),
)
"""Sizes of the blocks that autograd keeps for a graph node until the graph is freed. Nodes use these entries in turn.

Measured by wrapping malloc in a step of a GPT-2 (6 layers, 361 nodes) and of an unrolled GRU (4,374 nodes) with torch
2.13, at the peak, without `TENSOR_OBJECTS_BYTES`. Blocks for each node: 2.2 and 1.8 of 16 bytes, 1.4 and 0.9 of 24, 0.4
and 0.4 of 32, 0.2 and 0.3 of 184, 0.1 and 0.2 of 176, 0.1 of 64 and of 312, and one of 464 to 888. The number of small
blocks matters. A block of 16 bytes fits into the rest next to an aligned tensor, and prevents merging of that rest
when the tensor is freed.
"""


_MALLOCS, _FREES = (bytes((kind,)) * 16 for kind in (MALLOC, FREE))


class HeapCalls(NamedTuple):
    """Calls of the C library's heap functions in order, as columns.

    Blocks are numbered from 0 in the order of their allocation.

    Attributes:
        kinds: kind of each call, from ``MALLOC`` to ``MAP_FROM``.
        values: number of the block that ``MALLOC`` or ``MEMALIGN`` allocates or ``FREE`` frees; for ``MAP_FROM``, the
            new threshold in bytes.
        block_bytes: requested bytes of each block.
    """

    kinds: bytes
    values: array[int]
    block_bytes: array[int]


def heap_calls(
    deltas: Iterable[tuple[int, int]],
    beside_bytes: tuple[int, ...] = (),
    trims_before: Collection[int] = (),
    nodes_before: Mapping[int, int] | None = None,
    thresholds_before: Mapping[int, int] | None = None,
) -> HeapCalls:
    """List the heap calls of a training run.

    Args:
        deltas: ``(storage id, bytes to allocate)`` in order, with negative bytes to free the storage. An id may be
            reused after that.
        beside_bytes: sizes of the small blocks that torch allocates for each storage, see `TENSOR_OBJECTS_BYTES`.
        trims_before: indices of the deltas before which free pages are released.
        nodes_before: by the index of a delta, the number of nodes (see `NODE_OBJECTS_BYTES`) allocated before it, or if
            negative, freed before it, newest first.
        thresholds_before: by the index of a delta, the size in bytes from which later blocks are memory-mapped.

    Raises:
        KeyError: if a storage is freed that is not alive.
    """
    changes, thresholds = nodes_before or {}, thresholds_before or {}
    others = {*trims_before, *thresholds, *changes}
    asked = _Asked(beside_bytes)
    for index, (storage, num_bytes) in enumerate(deltas):
        if index in others:
            if index in trims_before:
                asked.call(TRIM)
            if index in thresholds:
                asked.call(MAP_FROM, thresholds[index])
            asked.change_nodes(changes.get(index, 0))
        if num_bytes < 0:
            asked.free(storage)
        else:
            asked.allocate(storage, num_bytes)
    return asked.calls()


class _Asked:
    """Builder of a list of calls; it tracks which blocks are alive."""

    def __init__(self, beside_bytes: tuple[int, ...]) -> None:
        self._kinds = bytearray()
        self._values, self._block_bytes = array("q"), array("q")
        self._before_bytes, self._behind_bytes = beside_bytes[:1], beside_bytes[1:]
        self._data_place = len(self._before_bytes)
        behind = range(self._data_place + 1, 1 + len(beside_bytes))
        self._order_of_free = (*behind[1:], self._data_place, *range(self._data_place), *behind[:1])
        self._tensor_kinds = _MALLOCS[: self._data_place] + bytes((MEMALIGN,)) + _MALLOCS[: len(behind)]
        self._first_of: dict[int, int] = {}  # by storage
        self._nodes: list[range] = []

    def calls(self) -> HeapCalls:
        return HeapCalls(bytes(self._kinds), self._values, self._block_bytes)

    def call(self, kind: int, value: int = 0) -> None:
        self._kinds.append(kind)
        self._values.append(value)

    def allocate(self, storage: int, num_bytes: int) -> None:
        """Allocate a tensor's data, which torch skips for 0 bytes, and its small blocks."""
        first = self._first_of[storage] = len(self._block_bytes)
        self._block_bytes.extend((*self._before_bytes, num_bytes, *self._behind_bytes))
        self._kinds += self._tensor_kinds
        self._values.extend(range(first, len(self._block_bytes)))
        if not num_bytes:
            place = first + self._data_place - len(self._block_bytes)
            del self._kinds[place], self._values[place]
        self.call(ROW)

    def free(self, storage: int) -> None:
        first = self._first_of.pop(storage)
        self._give_back([first + place for place in self._order_of_free if self._block_bytes[first + place]])
        self.call(ROW)

    def change_nodes(self, change: int) -> None:
        for _ in range(change):
            sizes = NODE_OBJECTS_BYTES[len(self._nodes) % len(NODE_OBJECTS_BYTES)]
            first = len(self._block_bytes)
            self._block_bytes.extend(sizes)
            self._nodes.append(range(first, first + len(sizes)))
            self._kinds += _MALLOCS[: len(sizes)]
            self._values.extend(self._nodes[-1])
        for _ in range(-change):
            self._give_back(self._nodes.pop())

    def _give_back(self, blocks: Sequence[int]) -> None:
        self._kinds += _FREES[: len(blocks)]
        self._values.extend(blocks)
