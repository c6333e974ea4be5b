"""Blocks that torch's CUDA allocator keeps are given back between steps, where it has reserved more than a line.

The allocator gives them back by itself before it raises. This pays where somebody else needs the memory: another
process on the card, NCCL, cuDNN, or anything else that asks the driver. Not in the hot loop: between steps, and only
above the line, since what is given back must be asked of the driver again.

Does NOT cover fragmentation inside segments that are partly in use, and the host's heap: that is `heap`.
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
    """`Technique`: the cache of the CUDA allocator is emptied when it is above a line."""

    name = "cache"
    numerics = "bitwise"
    summary = "cached blocks go back to the driver between steps, above a line"
    # It reaches nothing, as the process's own peak stays: the plan never tries it.
    is_for_trainers = True
    keeps_state_between_passes = False
    by_hand = "call torch.cuda.empty_cache() where memory is short"
    stage = "memory"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """After every step; a pin gives the line. Which line others need is not known here."""
        if setting.device != "cuda":
            return "there is no such cache on a CPU; `heap` gives free pages back"
        return (Choice(technique=self.name, options={"line_bytes": 0}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """A CPU, or no line."""
        if setting.device != "cuda":
            return "there is no such cache on a CPU; `heap` gives free pages back"
        line = choice.options.get("line_bytes")
        if not isinstance(line, int) or line < 0:
            return f"line_bytes is {line}: give the bytes reserved above which the cache is emptied, 0 or more"
        return None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Look at the cache after each step; on another device than CUDA, such as a dry run's, do nothing."""
        line_bytes, device = int(choice.options["line_bytes"]), workload.device

        def empty_above_line() -> None:
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > line_bytes:
                torch.cuda.empty_cache()

        after_step = (*workload.hooks.after_step, empty_above_line)
        with hooked(workload, replace(workload.hooks, after_step=after_step)):
            yield
