"""What an evaluation collects over its batches, kept outside the device and joined once.

A Trainer keeps the outputs of all batches on the device and, with each batch, concatenates them anew: for a moment they
are there twice. `Collected` takes the place of its container. On a GPU each batch goes to the host's memory, as with
``eval_accumulation_steps=1``; on a CPU inside a limit it goes to a mapped file (`plimsoll.device.mapped_memory`), which
the limit does not count. What comes out is equal: the same values, padded in the same way, as numpy arrays.

Does NOT cover what is no tensor: that is concatenated as transformers does it.
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

_PADDING = -100  # that of transformers


class Collected:
    """`transformers.trainer_pt_utils.EvalLoopContainer`, outside the device, with the methods that a Trainer calls.

    Args:
        do_nested_concat: join the batches; without it the result is a list of them.
        padding_index: what rows that are shorter than others end with.
        pool: the files to keep the batches in; ``None`` for the host's memory.
    """

    def __init__(
        self, do_nested_concat: bool = True, padding_index: int = _PADDING, *, pool: MappedPool | None = None
    ) -> None:
        self._is_joined, self._padding_index, self._pool = do_nested_concat, padding_index, pool
        self._batches: list[Any] = []

    def add(self, tensors: Any) -> None:
        """Take the outputs of one more batch."""
        self._batches.append(off_device(tensors, self._pool, for_numpy=True))

    def to_cpu_and_numpy(self) -> None:
        """Do nothing: they are there already."""

    def get_arrays(self) -> Any:
        """Return what was collected as numpy arrays, ``None`` where nothing was; they are no longer kept here."""
        batches, self._batches = self._batches, []
        if not batches:
            return None
        if not self._is_joined:
            return [nested_numpify(batch) for batch in batches]  # type: ignore[no-untyped-call]
        return nested_numpify(concatenated(batches, self._padding_index, self._pool))  # type: ignore[no-untyped-call]


def pool_for(device: torch.device) -> MappedPool | None:
    """Return a pool of files for what is collected, where that saves memory: on a CPU inside a limit, with a disk."""
    if device.type != "cpu" or budget_in_force_bytes() is None:
        return None
    try:
        return MappedPool(scratch_folder())
    except OutputError:  # all folders are kept in memory: so is what is collected
        return None


def off_device(tensors: Any, pool: MappedPool | None, *, for_numpy: bool = False) -> Any:
    """Move the tensors of nested tuples, lists and mappings to the host, or into a pool.

    Args:
        tensors: outputs of a batch.
        pool: where to; ``None`` for the host's memory.
        for_numpy: make float32 of bfloat16, which numpy does not have.
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
    """Put the outputs of batches one after the other, as a Trainer does: narrower ones are padded in dimension 1.

    Args:
        batches: of each batch a tensor, or a tuple, list or mapping of them; at least one.
        padding_index: what they are padded with.
        pool: where the result is made; ``None`` for the device that they are on.
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
    """Whether these are tensors that differ in rows and columns only."""
    if not all(isinstance(one, Tensor) and one.layout == torch.strided for one in batches):
        return False
    return len({(one.dtype, one.device, max(one.ndim, 1), one.shape[2:]) for one in batches}) == 1


def _concatenated(tensors: Sequence[Tensor], padding_index: int, pool: MappedPool | None) -> Tensor:
    num_rows = sum(map(len, tensors))
    num_columns = max(one.shape[1:2] for one in tensors)  # none of what has one number for each sample
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
