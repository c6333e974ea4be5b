"""Options for checkpointing some of the blocks, with memory needs between checkpointing none and all of them.

The bytes that a block saves are read from the trace of the plain training. The cost of recomputing a block is the work
of its forward ops. An integer program chooses the blocks (`plimsoll.planning.search.block_subset`). The effects of
these options are guesses until a combination with one of them is traced.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.models.workload import Workload
from plimsoll.planning.search.block_subset import choose_blocks
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Trace

# These options are for this technique only.
from plimsoll.techniques.checkpointing import Checkpointing, blocks_as_text, checkpointing_choice, saved_per_block
from plimsoll.techniques.mechanisms.blocks import blocks_of

BY_BLOCKS = Checkpointing.name
"""The technique whose blocks are chosen here."""

_SHARES = tuple(eighths / 8 for eighths in range(1, 8))  # of the saving from checkpointing every block
_BYTES_A_FLOP = 0.1  # bytes moved in the time of one operation, which converts bytes to operations


class SomeBlocks(NamedTuple):
    """A choice of blocks to checkpoint, with its effect relative to checkpointing all blocks.

    ``bytes_share`` is its share of the saved bytes, and ``seconds_share`` its share of the added seconds.
    """

    choice: Choice
    bytes_share: float
    seconds_share: float


def some_blocks(workload: Workload, trace: Trace) -> tuple[SomeBlocks, ...]:
    """Return choices that checkpoint some blocks but not all, weakest first; empty for a model of one block."""
    names = tuple(name for name, _ in blocks_of(workload.model))
    bytes_of = saved_per_block(trace, names)
    work = _work_of(trace, names)
    saved, kept = [one.saved_bytes for one in bytes_of], [one.kept_bytes for one in bytes_of]
    gains = [max(before - after, 0) for before, after in bytes_of]
    found: dict[str, SomeBlocks] = {}
    for share in _SHARES:
        chosen = choose_blocks(saved, work, kept, int(sum(saved) - share * sum(gains)))
        if chosen and len(chosen) < len(names):
            text = blocks_as_text(chosen, len(names))
            bytes_share = sum(gains[number] for number in chosen) / max(sum(gains), 1)
            seconds_share = sum(work[number] for number in chosen) / max(sum(work), 1e-9)
            found.setdefault(text, SomeBlocks(checkpointing_choice(text), bytes_share, seconds_share))
    return tuple(found.values())


def _work_of(trace: Trace, names: tuple[str, ...]) -> list[float]:
    """Return the work of each block's forward pass in the last step, with moved bytes converted to operations."""
    ops = trace.ops
    last_step = max(ops.step)
    block_of = {
        number: block
        for number, text in enumerate(trace.texts)
        for block, name in enumerate(names)
        if text == name or text.startswith(f"{name}.")
    }
    work = [0.0] * len(names)
    for row, module in enumerate(ops.module):
        if module in block_of and ops.phase[row] == "forward" and ops.step[row] == last_step:
            work[block_of[module]] += max(ops.flops[row], ops.moved_bytes[row] / _BYTES_A_FLOP)
    return work
