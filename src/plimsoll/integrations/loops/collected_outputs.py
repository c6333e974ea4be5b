"""A container that keeps the outputs of an evaluation off the device, and joins them once.

A Trainer keeps the outputs of all batches on the device and concatenates them again with each batch, so they briefly
exist twice. `Collected` replaces the container that the Trainer uses. On a GPU, the outputs of each batch are moved to
host memory, as with ``eval_accumulation_steps=1``. On a CPU under a memory limit, they are moved to a memory-mapped
file (`plimsoll.device.mapped_memory`), which the limit does not count. The results are the same numpy arrays with the
same padding.

Outputs that are not tensors are concatenated by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import nested_concat, nested_numpify

from plimsoll.device.cpu.data_limit import budget_in_force_bytes
from plimsoll.device.mapped_memory import MappedPool, scratch_folder
from plimsoll.errors import OutputError

_PADDING = -100  # the padding index of transformers


class Collected:
    """A replacement for `transformers.trainer_pt_utils.EvalLoopContainer` that keeps tensors off the device.

    Args:
        do_nested_concat: whether to join the batches; otherwise the result is a list with an entry for each batch.
        padding_index: the value that pads shorter rows.
        pool: the pool of memory-mapped files that holds the outputs; ``None`` for host memory.
    """

    def __init__(
        self, do_nested_concat: bool = True, padding_index: int = _PADDING, *, pool: MappedPool | None = None
    ) -> None:
        self._is_joined, self._padding_index, self._pool = do_nested_concat, padding_index, pool
        self._batches: list[Any] = []

    def add(self, tensors: Any) -> None:
        """Append the outputs of a batch."""
        self._batches.append(off_device(tensors, self._pool, for_numpy=True))

    def to_cpu_and_numpy(self) -> None:
        """Do nothing, because the tensors are on the host already."""

    def get_arrays(self) -> Any:
        """Return the collected outputs as numpy arrays, or ``None`` without batches, and clear the container."""
        batches, self._batches = self._batches, []
        if not batches:
            return None
        if not self._is_joined:
            return [nested_numpify(batch) for batch in batches]  # type: ignore[no-untyped-call]
        return nested_numpify(concatenated(batches, self._padding_index, self._pool))  # type: ignore[no-untyped-call]


def pool_for(device: torch.device) -> MappedPool | None:
    """Return a pool of memory-mapped files; ``None`` on a GPU, without a memory limit, or without a scratch folder."""
    if device.type != "cpu" or budget_in_force_bytes() is None:
        return None
    try:
        return MappedPool(scratch_folder())
    except OutputError:  # all scratch folders are in memory, so mapped files would save nothing
        return None


def off_device(tensors: Any, pool: MappedPool | None, *, for_numpy: bool = False) -> Any:
    """Move the tensors of nested tuples, lists and mappings to the host.

    Args:
        tensors: outputs of a batch.
        pool: the pool of memory-mapped files that holds the copies; ``None`` for host memory.
        for_numpy: convert bfloat16, which numpy does not have, to float32.
    """
    if isinstance(tensors, list | tuple):
        return type(tensors)(off_device(one, pool, for_numpy=for_numpy) for one in tensors)
    if isinstance(tensors, Mapping):
        moved = {name: off_device(one, pool, for_numpy=for_numpy) for name, one in tensors.items()}
        return type(tensors)(moved)  # type: ignore[call-arg]  # as transformers makes one
    if not isinstance(tensors, Tensor):
        return tensors
    on_host = tensors.detach().cpu()
    on_host = on_host.float() if for_numpy and on_host.dtype == torch.bfloat16 else on_host
    return on_host if pool is None or on_host.layout != torch.strided else pool.copy_of(on_host)


def concatenated(batches: Sequence[Any], padding_index: int = _PADDING, pool: MappedPool | None = None) -> Any:
    """Concatenate the outputs of batches as a Trainer does: narrower tensors are padded in dimension 1.

    Args:
        batches: the outputs of at least one batch: tensors, or tuples, lists or mappings of tensors.
        padding_index: the padding value.
        pool: the pool of memory-mapped files that holds the result; ``None`` for the device of the batches.
    """
    first = batches[0]
    if len(batches) == 1 or first is None:
        return first
    if isinstance(first, list | tuple):
        return type(first)(concatenated(each, padding_index, pool) for each in zip(*batches, strict=True))
    if isinstance(first, Mapping):
        return type(first)({name: concatenated([one[name] for one in batches], padding_index, pool) for name in first})  # type: ignore[call-arg]
    if not _are_alike(batches):
        return reduce(lambda one, other: nested_concat(one, other, padding_index), batches)  # type: ignore[no-untyped-call]
    tensors = [one if one.ndim else one[None] for one in batches]
    return _concatenated(tensors, padding_index, pool)


def _are_alike(batches: Sequence[Any]) -> bool:
    """Return whether all outputs are dense tensors that differ only in the number of rows and columns."""
    if not all(isinstance(one, Tensor) and one.layout == torch.strided for one in batches):
        return False
    return len({(one.dtype, one.device, max(one.ndim, 1), one.shape[2:]) for one in batches}) == 1


def _concatenated(tensors: Sequence[Tensor], padding_index: int, pool: MappedPool | None) -> Tensor:
    num_rows = sum(map(len, tensors))
    num_columns = max(one.shape[1:2] for one in tensors)  # empty for tensors with one number per sample
    shape = (num_rows, *num_columns, *tensors[0].shape[2:])
    if pool is None:
        whole = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    else:
        whole = pool.empty_like(torch.empty(shape, dtype=tensors[0].dtype, device="meta"))
    start = 0
    for one in tensors:
        rows = whole[start : start + len(one)]
        if one.ndim > 1 and one.shape[1] < whole.shape[1]:
            rows[:, one.shape[1] :] = padding_index
            rows = rows[:, : one.shape[1]]
        rows.copy_(one)
        start += len(one)
    return whole
