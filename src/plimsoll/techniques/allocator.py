"""Settings of torch's CUDA allocator against fragmentation: by default, segments that grow in place.

``expandable_segments`` reserves addresses once and maps memory to them on demand, so that free memory is in one block.
The effect is predicted by a simulation of the allocator on existing traces (`mechanisms.allocators`). A plan uses this
technique if a combination of techniques, or a larger micro-batch, does not fit without it. A run whose plan lacks it
makes later segments expandable as a last resort (`plimsoll.device.cuda.backend`).

``max_split_size_mb`` and ``roundup_power2_divisions`` can be pinned. A choice that would override a setting in the
user's environment is refused.

Does NOT cover ``cudaMallocAsync``, and fragmentation from batches whose lengths change between steps. The dry run uses
batches of full length and cannot predict such fragmentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from plimsoll.device.cuda import allocator_settings
from plimsoll.errors import InputError
from plimsoll.memory.allocator.options import rules_from_text
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

_BY_DEFAULT = {
    "expandable_segments": "False",
    "max_split_size_mb": str((1 << 64) >> 20),  # torch's "unlimited", in MiB
    "roundup_power2_divisions": "1",
}
"""The settings that can be chosen, with torch's defaults, which `Allocator.install` restores on exit."""


class Allocator(Technique):
    """`Technique`: settings of torch's CUDA allocator."""

    name = "allocator"
    numerics = "bitwise"
    summary = "segments of the CUDA allocator grow in place, which leaves no holes between them"
    reaches = frozenset({"fragmentation"})
    works_on_shards = True
    decides_time = True
    unoffered: ClassVar = {"max_split_size_mb": 0, "roundup_power2_divisions": 0}
    is_traced = False
    keeps_state_between_passes = False
    by_hand = "on CUDA, set PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF before torch 2.9) before the process starts"
    remedies: ClassVar = {"fragmentation": 1}
    stage = "memory"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice, expandable segments, if the environment does not forbid them."""
        if setting.device != "cuda":
            return "it is for CUDA; on a CPU `heap` sets up the C library's heap"
        return allocator_settings.clash() or (Choice(technique=self.name, options={allocator_settings.GROWING: True}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the device is a CPU, or settings are unknown, conflict, or are set in the environment."""
        if setting.device != "cuda":
            return "it is for CUDA; on a CPU `heap` sets up the C library's heap"
        if not choice.options.keys() <= _BY_DEFAULT.keys() or not choice.options:
            given = ", ".join(choice.options) or "no setting"
            return f"it is given {given}: give one of {', '.join(_BY_DEFAULT)}"
        if choice.options.get(allocator_settings.GROWING) and "max_split_size_mb" in choice.options:
            return "expandable_segments and max_split_size_mb leak together (pytorch#193400): leave one of them out"
        try:
            rules_from_text(_text(choice))
        except InputError as error:
            return str(error)
        if choice.options.get(allocator_settings.GROWING):
            return allocator_settings.clash()
        own = allocator_settings.text_of(os.environ)
        return f"the environment sets {own} already" if own else None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Set up the allocator of this process; on exit, restore the defaults. Without CUDA, do nothing."""
        is_real = workload.device.type == "cuda"
        if is_real:
            allocator_settings.set_up(_text(choice))
        try:
            yield
        finally:
            if is_real:
                allocator_settings.set_up(",".join(f"{key}:{_BY_DEFAULT[key]}" for key in choice.options))

    def allocator_settings(self, choice: Choice) -> str:
        """Return the options of a choice in the format of ``PYTORCH_CUDA_ALLOC_CONF``."""
        return _text(choice)


def _text(choice: Choice) -> str:
    return ",".join(f"{key}:{value}" for key, value in choice.options.items())  # torch reads True and False
