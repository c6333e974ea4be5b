"""Accounting for weights that are mapped copy-on-write: a limit counts pages before an optimizer writes them.

A page of such a mapping becomes private memory when it is written. No limit can refuse it then, because ``RLIMIT_DATA``
counts addresses. Inside a Plimsoll limit, all pages that a torch optimizer will write are therefore counted before its
step. If they do not fit, an out-of-memory error is raised before anything is written. Other writes (``weight.add_``,
``load_state_dict``) are counted afterwards, by `plimsoll.device.cpu.data_limit.follow`.
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
    """Register a tensor that is mapped copy-on-write."""
    _UNCOUNTED.add(tensor)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_count)


def _count(optimizer: Any, *_: object) -> None:
    """Count the mapped tensors that an optimizer is about to write, each once.

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
