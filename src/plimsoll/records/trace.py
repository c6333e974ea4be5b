"""The ops of a training step and their storages, in order: the common form of predictions and measurements.

A trace has two tables, stored as columns because a large model has 10^4 to 10^5 rows. ``ops`` lists the ops that ran.
``storages`` lists allocations and when they were freed. Repeated strings (op names, module paths, source lines) are
stored once in ``texts``; rows contain indices into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record

Category = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer states",
    "activations",
    "temporaries",
    "inputs",
    "embeddings",
    "context",
    "fragmentation",
    "baseline",
]
"""The purposes of memory. Traces, predictions and reports all use these names."""

CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]

Phase = Literal["setup", "copy", "forward", "loss", "backward", "clip", "optimizer", "evaluation"]
"""The activity of a training run at one moment. ``setup`` is everything before the first step."""


class OpTable(Frozen):
    """One row per op that ran. ``name``, ``module`` and ``line`` are indices into ``texts``; ``step`` counts from 1.

    ``flops`` are the operations of matrix products in the data type ``dtype``, an index into ``texts``. ``moved_bytes``
    are the bytes that the op reads or writes in device memory, ``outside_bytes`` in other memory. All are 0 for a view.
    ``by_autograd`` is true if autograd's own code called the op in a backward pass. It is false if Python code called
    the op, as in recomputation.
    """

    name: tuple[int, ...]
    module: tuple[int, ...]
    line: tuple[int, ...]
    phase: tuple[Phase, ...]
    step: tuple[int, ...]
    by_autograd: tuple[bool, ...]
    flops: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    outside_bytes: tuple[int, ...]
    dtype: tuple[int, ...]


class StorageTable(Frozen):
    """One row per allocation. ``born`` and ``died`` are the rows of the ops that allocated and freed it.

    ``died`` is -1 if the storage was alive at the end. ``shape`` is the index of a text such as
    ``float32[8, 128, 768]``, for the first tensor in the storage. ``name`` is the index of the storage's name (a
    parameter, its gradient, its states), or of the empty text. ``on_host`` is true if the storage is not in the memory
    of the training device: in host memory for a GPU, or in a mapped file for the CPU.
    """

    num_bytes: tuple[int, ...]
    category: tuple[Category, ...]
    born: tuple[int, ...]
    died: tuple[int, ...]
    shape: tuple[int, ...]
    name: tuple[int, ...]
    on_host: tuple[bool, ...]


class Assumption(Frozen):
    """An assumption that a prediction makes about an unknown fact.

    If the assumption is wrong, the peak may be higher by up to ``high_bytes`` or lower by up to ``-low_bytes``.
    ``low_bytes`` is 0 or negative.
    """

    text: str
    low_bytes: int = 0
    high_bytes: int = 0


class Trace(Record):
    """The memory of a training run: traced without allocating it (``predicted``), or recorded (``measured``).

    A ``storage`` or an ``op`` in the tuples below is a row of ``storages`` or ``ops``. ``lowered_to`` is the kind of
    device that the trace is for, such as ``cpu`` or ``cuda 8.0``.

    ``events`` are allocations and frees in order: ``storage + 1`` for an allocation, ``-(storage + 1)`` for a free.
    ``event_op`` is the row of the op that was running.

    ``unwritten`` are ``(storage, bytes)``: the bytes of a storage that no op ever writes. They use address space but no
    memory. ``nodes`` are the nodes of autograd's graph, ``(op, op, number)``: the rows at which ``number`` nodes were
    created and freed (-1 if alive at the end).

    ``copies`` are copies on a separate stream, concurrent with the computation: ``(op, whether it copies to the
    device)``. Other copies are in the device's main queue. ``waits`` are ``(op, op of a copy, whether the CPU waits,
    too)``: the device starts the op after the copy has ended. ``captured`` are ``(op, op)``: the first row, and the row
    after the last, of a captured CUDA graph, which runs as one launch in its own memory.
    """

    record_kind: ClassVar[str] = "trace"
    schema_version: ClassVar[int] = 4

    source: Literal["predicted", "measured"]
    lowered_to: str
    texts: tuple[str, ...]
    ops: OpTable
    storages: StorageTable
    events: tuple[int, ...]
    event_op: tuple[int, ...]
    assumptions: tuple[Assumption, ...] = ()
    unwritten: tuple[tuple[int, int], ...] = ()
    nodes: tuple[tuple[int, int, int], ...] = ()
    copies: tuple[tuple[int, bool], ...] = ()
    waits: tuple[tuple[int, int, bool], ...] = ()
    captured: tuple[tuple[int, int], ...] = ()

    def deltas(self, on_host: bool = False) -> Iterator[tuple[int, int, int]]:
        """Yield ``(event, storage, bytes)`` in order, with negative bytes for a free.

        Args:
            on_host: yield only storages outside the training device; by default, only storages on it.
        """
        num_bytes, places = self.storages.num_bytes, self.storages.on_host
        for event, signed in enumerate(self.events):
            storage = abs(signed) - 1
            if places[storage] == on_host:
                yield event, storage, num_bytes[storage] if signed > 0 else -num_bytes[storage]
