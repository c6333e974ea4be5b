"""Every op of a training step and every storage it made, in order: what a prediction and a measurement both look at.

A trace has two tables, kept as columns because a large model has 10^4 to 10^5 rows. ``ops`` is what ran; ``storages``
is what was allocated and when it was given back. Texts that repeat (op names, module paths, source lines) are kept once
in ``texts``, and a row has the number of its text.
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
"""What memory is used for; the same words everywhere."""

CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]

Phase = Literal["setup", "copy", "forward", "loss", "backward", "clip", "optimizer", "evaluation"]
"""What a training does at a moment. ``setup`` is everything before the first step."""


class OpTable(Frozen):
    """One row per op that ran. ``name``, ``module`` and ``line`` are numbers of texts; ``step`` counts from 1.

    ``flops`` are the operations of its products, in the type whose text has the number ``dtype``; ``moved_bytes`` are
    read or written in the device's memory, ``outside_bytes`` in other memory. A view has none of these. An op is
    ``by_autograd`` if autograd's own code called it in a backward pass, and not Python, as in a recomputation.
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
    """One row per allocation. ``born`` and ``died`` are rows of the ops; ``died`` is -1 if it was alive at the end.

    ``shape`` is the number of a text like ``float32[8, 128, 768]``, of the first tensor in it, ``name`` that of what it
    is called (a parameter, its gradient, its states), or of the empty text. ``on_host`` says that
    it does not lie in the memory of the device that trains: it is in the host's memory and the training elsewhere, or
    in a mapped file and the training on the CPU.
    """

    num_bytes: tuple[int, ...]
    category: tuple[Category, ...]
    born: tuple[int, ...]
    died: tuple[int, ...]
    shape: tuple[int, ...]
    name: tuple[int, ...]
    on_host: tuple[bool, ...]


class Assumption(Frozen):
    """Something that was assumed in place of a fact.

    The peak may be lower by ``-low_bytes`` (0 or negative) or higher by ``high_bytes`` for it.
    """

    text: str
    low_bytes: int = 0
    high_bytes: int = 0


class Trace(Record):
    """The memory of one training: traced without allocating it (``PREDICTED``), or recorded while it ran.

    ``events`` are the allocations and frees in the order they happened: ``storage + 1`` for its birth, ``-(storage +
    1)`` for its death; ``event_op`` is the row of the op that was running.

    ``unwritten`` are ``(storage, bytes)``: how much of a storage no op ever writes, so that it takes addresses and no
    memory. ``nodes`` are those of autograd's graph: ``(op, op, number)``, the rows at which they were made and from
    which on they are gone (-1 if they were there at the end).

    ``copies`` are those that run beside the computation, on a stream of their own: ``(op, whether it is to the
    device)``; an op that copies and is not among them is one of the device's queue. ``waits`` are ``(op, op of a copy,
    whether the processor waits, too)``: the device begins the first after the second has ended.
    ``captured`` are ``(op, op)``: the rows from which and before which a captured CUDA graph does the ops, in one
    launch and in memory of its own.
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
        """Yield ``(event, storage, bytes)`` of one place in order; bytes are negative for a death."""
        num_bytes, places = self.storages.num_bytes, self.storages.on_host
        for event, signed in enumerate(self.events):
            storage = abs(signed) - 1
            if places[storage] == on_host:
                yield event, storage, num_bytes[storage] if signed > 0 else -num_bytes[storage]
