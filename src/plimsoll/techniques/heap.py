"""The C library's heap on a CPU: from which size a block is a mapping of its own, and pages given back after each step.

Freed blocks between live ones stay the process's; a mapping goes back at once and is cleared anew each time it is made
(`plimsoll.device.cpu.heap` has the measured table). Inside a budget blocks are mapped from 4 MiB on, without this
technique. Where memory suffices, ``never`` is the fastest: what is freed is kept, and nothing is cleared twice. The
effect is predicted by simulating the heap with its rules (`mechanisms.allocators`).

Does NOT cover other C libraries than glibc, where nothing is done, and memory that no block of the heap is.
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
"""The thresholds by the word for them, what keeps most first."""


class Heap(Technique):
    """`Technique`: how the heap of the host is set up."""

    name = "heap"
    numerics = "bitwise"
    summary = "freed memory is kept for speed, or goes back to the system sooner for room"
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
        """What keeps everything, and what keeps less than a budget's default does."""
        if setting.device != "cpu":
            return "the heap is the host's; on this device `cache` empties what the allocator keeps"
        if not heap.is_glibc():
            return "the C library of this system is not glibc, so nothing is known of its heap"
        return (_choice("never"), _choice("32MiB"), _choice("128KiB"))

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Another device than the CPU, a threshold that was not measured, or a trim of what is to be kept."""
        if setting.device != "cpu":
            return f"the heap is the host's, and this training is on {setting.device}"
        if choice.options.get("mapped_from", "4MiB") not in MAPPED_FROM_BYTES:
            return f"mapped_from is {choice.options['mapped_from']}: give one of {', '.join(MAPPED_FROM_BYTES)}"
        if _threshold_bytes(choice) is None and _trims(choice):
            return "mapped_from=never keeps what trim=true gives back: leave one of them out"
        return None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Set the threshold of this process; the exit sets what is in force without a plan."""
        trims = (heap.trim,) if _trims(choice) else ()
        hooks = replace(workload.hooks, after_step=(*workload.hooks.after_step, *trims))
        with hooked(workload, hooks), blocks_mapped_from(_threshold_bytes(choice)):
            yield

    def heap_rules(self, choice: Choice) -> HeapRules | None:
        """Return the rules of the threshold."""
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
