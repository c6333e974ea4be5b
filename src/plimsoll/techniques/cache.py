"""Release of cached blocks of torch's CUDA allocator between steps, if more than ``line_bytes`` are reserved.

The allocator releases cached blocks by itself before it raises an out-of-memory error. This technique helps if others
need the memory: another process on the GPU, NCCL, cuDNN, or any other library that allocates from the driver. Released
memory must be requested from the driver again. So it is released only between steps, and only above the limit.

Does NOT cover fragmentation inside segments that are partly in use, and the heap of the host (see `heap`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from plimsoll.models.workload import Workload, hooked
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique


class Cache(Technique):
    """`Technique`: empty the cache of the CUDA allocator above a limit."""

    name = "cache"
    numerics = "bitwise"
    summary = "cached blocks are returned to the driver between steps, above a limit"
    # `reaches` is empty, because the peak of the process stays the same; so a plan never tries this technique.
    is_for_trainers = True
    keeps_state_between_passes = False
    by_hand = "call torch.cuda.empty_cache() when memory is short"
    stage = "memory"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice that empties the cache after every step. A limit can be pinned."""
        if setting.device != "cuda":
            return "there is no such cache on a CPU; `heap` gives free pages back"
        return (Choice(technique=self.name, options={"line_bytes": 0}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the device is a CPU, or the limit is invalid."""
        if setting.device != "cuda":
            return "there is no such cache on a CPU; `heap` gives free pages back"
        line = choice.options.get("line_bytes")
        if not isinstance(line, int) or line < 0:
            return f"line_bytes is {line}: give the reserved bytes above which the cache is emptied, 0 or more"
        return None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Empty the cache after each step that ends above the limit. Without CUDA, as in a dry run, do nothing."""
        line_bytes, device = int(choice.options["line_bytes"]), workload.device

        def empty_above_line() -> None:
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > line_bytes:
                torch.cuda.empty_cache()

        after_step = (*workload.hooks.after_step, empty_above_line)
        with hooked(workload, replace(workload.hooks, after_step=after_step)):
            yield
