"""Settings of the C library's heap on a CPU: the size from which blocks get their own mapping, and trims after steps.

Freed blocks between live blocks remain part of the process. A mapping is returned to the system at once, but the kernel
clears the pages of each new mapping (`plimsoll.device.cpu.heap` has measured times). Without this technique, blocks of
4 MiB or more are mapped in a training with a budget. If memory is sufficient, ``never`` is the fastest: freed memory is
kept, and its pages are not cleared again. The effect is predicted by a simulation of the heap
(`mechanisms.allocators`).

Does NOT cover memory outside the heap, and C libraries other than glibc.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from plimsoll.device.cpu import heap
from plimsoll.models.workload import Workload, hooked
from plimsoll.records.allocator import FAST_HEAP, KEPT_HEAP, HeapRules
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.allocators import blocks_mapped_from
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

MAPPED_FROM_BYTES = {
    "never": None,
    "32MiB": heap.USUAL_BYTES,
    "4MiB": heap.FAST_BYTES,
    "1MiB": 1 << 20,
    "128KiB": heap.TIGHT_BYTES,
}
"""The mapping thresholds by name, in bytes; ``None``: map no block. The first keeps the most memory."""


class Heap(Technique):
    """`Technique`: settings of the heap of the host."""

    name = "heap"
    numerics = "bitwise"
    summary = "freed memory is kept for speed, or returned to the system sooner to save memory"
    reaches = frozenset({"fragmentation"})
    works_on_shards = True
    is_for_trainers = True
    may_be_faster = True
    decides_time = True
    is_traced = False
    keeps_state_between_passes = False
    by_hand = "on the CPU, set glibc's MALLOC_TRIM_THRESHOLD_ before the start"
    remedies: ClassVar = {"fragmentation": 0}
    stage = "memory"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return three choices of a threshold: keep all freed memory, more of it than by default, or less."""
        if setting.device != "cpu":
            return "it is for the heap of a CPU; on this device `cache` empties the allocator's cache"
        if not heap.is_glibc():
            return "the C library of this system is not glibc, and other heaps cannot be set up"
        return (_choice("never"), _choice("32MiB"), _choice("128KiB"))

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the device is not a CPU, the threshold is unknown, or ``trim`` contradicts it."""
        if setting.device != "cpu":
            return f"it is for the heap of a CPU, and this training is on {setting.device}"
        if choice.options.get("mapped_from", "4MiB") not in MAPPED_FROM_BYTES:
            return f"mapped_from is {choice.options['mapped_from']}: give one of {', '.join(MAPPED_FROM_BYTES)}"
        if _threshold_bytes(choice) is None and _trims(choice):
            return "mapped_from=never keeps the memory that trim=true returns: leave one of them out"
        return None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Set the mapping threshold of this process; on exit, set the threshold that applies without a plan."""
        trims = (heap.trim,) if _trims(choice) else ()
        hooks = replace(workload.hooks, after_step=(*workload.hooks.after_step, *trims))
        with hooked(workload, hooks), blocks_mapped_from(_threshold_bytes(choice)):
            yield

    def heap_rules(self, choice: Choice) -> HeapRules | None:
        """Return the rules by which a simulation of the heap predicts the effect of a choice."""
        threshold_bytes = _threshold_bytes(choice)
        if threshold_bytes is None:
            return KEPT_HEAP
        changed = {
            "mmap_threshold_bytes": threshold_bytes, "trim_threshold_bytes": heap.top_bytes(threshold_bytes),
            "trims_after_steps": _trims(choice),
        }  # fmt: skip
        return FAST_HEAP.model_copy(update=changed)


def _choice(mapped_from: str) -> Choice:
    return Choice(technique=Heap.name, options={"mapped_from": mapped_from})


def _threshold_bytes(choice: Choice) -> int | None:
    return MAPPED_FROM_BYTES[str(choice.options.get("mapped_from", "4MiB"))]


def _trims(choice: Choice) -> bool:
    return bool(choice.options.get("trim", False))
