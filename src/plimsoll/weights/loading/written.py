"""Weights that are mapped copy on write and will be written: their pages count before they are taken.

A page of such a mapping becomes private memory when it is written, and no limit can refuse it then: ``RLIMIT_DATA``
counts addresses. So inside a limit of ours all that an optimizer of torch's class is about to write is counted before
its step, and where it does not fit, that is an out-of-memory error before anything is written. What is written
otherwise (``weight.add_``, ``load_state_dict``) is counted after it, by `plimsoll.device.cpu.data_limit.follow`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from plimsoll.device.cpu.data_limit import budget_in_force_bytes, count_untouched
from plimsoll.device.cpu.pages import FileMappings
from plimsoll.device.mapped_memory import StorageSet

_UNCOUNTED = StorageSet()


def note_mapped(tensor: Tensor) -> None:
    """Say that a tensor is mapped copy on write."""
    _UNCOUNTED.add(tensor)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_count)


def _count(optimizer: Any, *_: object) -> None:
    """Count what an optimizer is about to write, once.

    Raises:
        MemoryError: if the limit does not allow it.
    """
    if budget_in_force_bytes() is None:
        return
    learning = (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None)
    written = [parameter for parameter in learning if parameter in _UNCOUNTED]
    if not written:
        return
    files = FileMappings()
    count_untouched(sum(one.untyped_storage().nbytes() - files.private_bytes(one) for one in written))
    for parameter in written:
        _UNCOUNTED.discard(parameter)


_count.works_in_parts = True  # type: ignore[attr-defined]  # see `plimsoll.models.optimizers.is_separable`
