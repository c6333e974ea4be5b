"""What a training asks of the C library, call by call: from the births and deaths of a trace's storages to its heap.

A tensor is more than its data: torch takes small blocks beside them, and autograd some for each node of its graph. The
calls do not depend on how the heap is set up, so one list of them serves every heap that a trace is replayed in.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

MALLOC, MEMALIGN, FREE, ROW, TRIM, MAP_FROM = range(6)
"""Of a call, what it is. A ``ROW`` is none: here a delta ends, and what is resident then is noted."""

TENSOR_OBJECTS_BYTES = (96, 176, 24)
"""What torch takes of the heap while a tensor's data live: the storage's block before the data, the tensor's and its
sizes' behind; they go sizes first, then the data, the storage and the tensor.

Counted, with their order, by wrapping malloc around GPT-2, BERT and GRU steps (torch 2.13). The order decides: behind a
tensor that goes lie the two blocks of one that stays. With all three behind the data, as in an earlier version, the
replayed heap of a 6-layer GPT-2 (which keeps freed blocks) was 7 % smaller than the recorded one.
"""

NODE_OBJECTS_BYTES = (
    (16, 16, 24, 32, 488),
    (16, 16, 24, 184, 552),
    (16, 16, 24, 32, 176, 464),
    (16, 16, 24, 24, 312, 64, 640),
)
"""What autograd keeps of an op until its graph is gone: the blocks of each node, in turn.

Counted by wrapping malloc around a step of a GPT-2 (6 layers, 361 nodes) and of a GRU that is unrolled (4,374 nodes),
torch 2.13, when most were alive, less `TENSOR_OBJECTS_BYTES`: for each node 2.2 and 1.8 blocks of 16 bytes, 1.4 and 0.9
of 24, 0.4 and 0.4 of 32, 0.2 and 0.3 of 184, 0.1 and 0.2 of 176, 0.1 of 64 and of 312, and one of 464 to 888. How many
are small matters: a block of 16 bytes lies in what an aligned tensor leaves beside it, and keeps that from being joined
when the tensor goes.
"""


_MALLOCS, _FREES = (bytes((kind,)) * 16 for kind in (MALLOC, FREE))


class HeapCalls(NamedTuple):
    """Calls in order, as columns; blocks are numbered as they are taken, from 0.

    ``values`` have the number of the block that a ``MALLOC`` or ``MEMALIGN`` takes or a ``FREE`` gives back, and the
    size from which ``MAP_FROM`` has blocks mapped. ``block_bytes`` are the bytes asked for, by block.
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
    """List the calls of a training.

    Args:
        deltas: ``(storage id, bytes to allocate)`` in order, negative bytes for the storage's free. An id may be used
            again after that.
        beside_bytes: the small blocks that come and go with each storage, see `TENSOR_OBJECTS_BYTES`.
        trims_before: the numbers of the deltas before which free pages are given back.
        nodes_before: by the number of a delta, how many nodes (see `NODE_OBJECTS_BYTES`) are taken before it or, if
            negative, given back, the newest first.
        thresholds_before: by the number of a delta, the size from which blocks are mapped from there on.

    Raises:
        KeyError: if a storage is freed that is not live.
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
    """Calls as they are listed, and the blocks of what is live."""

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
        """Take a tensor's data, which torch does not ask for if they are none, and what lies beside them."""
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
