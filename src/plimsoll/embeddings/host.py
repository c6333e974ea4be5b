"""An embedding table that stays in host memory or in a file; only the rows of a batch are on the device.

    table = HostEmbedding(10_000_000, 64, path="table.bin")
    optimizer = optimizer_of(model, torch.optim.Adagrad, lr=0.1)
    for batch in table.prefetched(loader, ids=lambda batch: batch["input_ids"], optimizer=optimizer):
        ...

It replaces ``nn.Embedding(sparse=True)``, with the same calls, ids, outputs and gradients. With ``path=`` the table is
a shared memory-mapped file, which limits on private memory do not count.

Shapes: N rows of the table, D numbers per row, U distinct ids of a batch, K ids that have a gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from plimsoll.device import mapped_memory
from plimsoll.device.cpu.pages import copied_on_write
from plimsoll.device.dtypes import floating_type
from plimsoll.embeddings.host_prefetch import prefetched, read_rows
from plimsoll.errors import InputError, OutputError

_BLOCK_ELEMENTS = 1 << 24  # a multiple of 16, torch's group size for normal numbers: blocks do not change the result


class HostEmbedding(nn.Module):
    """An embedding table on the host. Its weight is a parameter on the CPU that ``.to()`` does not move.

    ``.half()``, ``.to(dtype)`` and the like change the data type of the output, not of the table. On the CPU, results
    are bitwise identical to ``nn.Embedding(sparse=True)`` under Adagrad and SparseAdam. With several micro-batches and
    on other devices, gradients are summed in another order, which changes the rounding. Under SGD the order differs,
    too: for ``nn.Embedding``, SGD adds the terms of a row's gradient to the row one by one.

    Does NOT support ``max_norm``, ``scale_grad_by_freq``, dense gradients (Adam, AdamW, weight decay), second
    derivatives, ``torch.compile``, or several processes that train one table. ``copy.deepcopy`` copies a mapped table
    into memory.

    Args:
        num_embeddings: the number of rows, at least 1.
        embedding_dim: the numbers per row, at least 1.
        padding_idx: the row that is initialized to zeros and gets no gradient; a negative index counts from the end.
            ``None``: no such row.
        path: the file for the table. An existing file is opened unchanged. ``None``: keep the table in memory.
        dtype: data type of the table, such as ``torch.float16`` or ``"fp16"``; default: torch's default type.
        initialize: function that initializes a block of rows (rows, D) in place; not called for an existing file.

    Raises:
        InputError: if a number is out of its range.
        OutputError: if the file has the wrong size, cannot be written, or does not fit on its disk.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        path: str | Path | None = None,
        dtype: torch.dtype | str | None = None,
        initialize: Callable[[Tensor], object] = nn.init.normal_,
        _weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = _positive(num_embeddings, embedding_dim)
        self.padding_idx = _padding_row(padding_idx, num_embeddings)
        self.path = None if path is None else Path(path)
        if _weight is None:
            shape, chosen = (num_embeddings, embedding_dim), floating_type(dtype or torch.get_default_dtype())
            _weight = _table(self.path, shape, chosen, lambda weight_ND: self._begin(weight_ND, initialize))
        self.weight = nn.Parameter(_weight)
        self.weight.register_post_accumulate_grad_hook(_coalesce_gradient)  # type: ignore[no-untyped-call]
        self.output_dtype = _weight.dtype

    @classmethod
    def from_rows(
        cls,
        rows: NDArray[Any] | Tensor,
        *,
        trainable: bool = True,
        padding_idx: int | None = None,
        path: str | Path | None = None,
    ) -> HostEmbedding:
        """Make a table from existing rows. Like ``nn.Embedding.from_pretrained``, it does not change the padding row.

        Args:
            rows: a matrix of floats (N, D), in memory or mapped (``numpy.memmap``).
            trainable: whether the table is trained. If it is, the rows are copied, so that ``rows`` does not change. A
                frozen table without a ``path`` shares the memory of ``rows``. If ``rows`` is a file opened for reading,
                later writes (by ``load_state_dict``) go to private memory.
            padding_idx: the row that gets no gradient; a negative index counts from the end. ``None``: no such row.
            path: a new file for a copy of the rows; ``None``: keep them in memory.

        Raises:
            InputError: if the rows are not a matrix of floats.
            OutputError: if the file exists, or does not fit on its disk.
        """
        rows_ND = _matrix(rows)
        num_rows, width = rows_ND.shape
        if trainable or path is not None:
            if path is not None and Path(path).exists():
                raise OutputError(
                    f"cannot copy {num_rows:,} rows to {path}: it exists; remove it, or open it with "
                    f"HostEmbedding({num_rows}, {width}, path=...)"
                )
            where = None if path is None else Path(path)
            rows_ND = _table(where, (num_rows, width), rows_ND.dtype, lambda weight_ND: weight_ND.copy_(rows_ND))
        embedding = cls(num_rows, width, padding_idx, path=path, _weight=rows_ND)
        embedding.weight.requires_grad_(trainable)
        return embedding

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids.

        Args:
            ids: integers of any shape (...), on any device.

        Returns:
            the rows (..., D) on the device of the ids.

        Raises:
            IndexError: if an id is not a row of the table.
        """
        rows: Tensor = _Lookup.apply(self.weight, ids, self.padding_idx)  # type: ignore[no-untyped-call]
        return rows.to(self.output_dtype)

    def prefetch(self, ids: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read the rows of ids from the disk into the page cache, and return when they are in memory.

        Args:
            ids: integers of any shape.
            optimizer: an optimizer whose states for these rows are read, too; ``None``: read only the rows.

        Raises:
            IndexError: if an id is not a row of the table.
        """
        ids = ids.detach().cpu()
        _refuse_outside(ids, self.num_embeddings)
        states = {} if optimizer is None else optimizer.state.get(self.weight, {})
        mapped = [state for state in states.values() if isinstance(state, Tensor) and state.shape == self.weight.shape]
        read_rows([self.weight.detach(), *mapped], ids)

    def prefetched(
        self,
        loader: Iterable[Any],
        ids: Callable[[Any], Tensor],
        ahead: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Iterator[Any]:
        """Yield the batches of a loader while a thread reads the rows of the following batches from the disk.

        Rows are read into the page cache and not copied, so a lookup sees the latest update. The loader is used in the
        calling thread, and is ``ahead`` batches further than the batch yielded. So an error of the loader is raised
        that number of batches too early. If the loader's position is saved during the iteration, for example in a
        checkpoint, it is that number of batches too far.

        Args:
            loader: an iterable of batches.
            ids: function that returns the ids that a batch will look up.
            ahead: number of batches to read ahead, at least 1.
            optimizer: an optimizer whose states for these rows are read, too; ``None``: read only the rows.

        Raises:
            InputError: if ``ahead`` is less than 1.
            IndexError: if an id is not a row of the table.
        """
        if ahead < 1:
            raise InputError(f"cannot read {ahead} batches ahead: give 1 or more, or use the loader as it is")
        return prefetched(loader, lambda batch: self.prefetch(ids(batch), optimizer), ahead)

    def extra_repr(self) -> str:
        """Return a description like that in ``nn.Embedding``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}" + (f", path={self.path}" if self.path else "")

    def _begin(self, weight_ND: Tensor, initialize: Callable[[Tensor], object]) -> None:
        with torch.no_grad():
            for block_RD in torch.split(weight_ND, max(_BLOCK_ELEMENTS // self.embedding_dim // 16 * 16, 16)):
                initialize(block_RD)
            if self.padding_idx is not None:
                weight_ND[self.padding_idx].zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostEmbedding:
        self.output_dtype = fn(torch.empty(0, dtype=self.output_dtype)).dtype
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        # `assign=True` would replace this table by one in memory.
        in_place = local_metadata | {"assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, in_place, *arguments)


class _Lookup(torch.autograd.Function):
    """A lookup in a table on the CPU, with the result on the device of the ids. The gradient is sparse and on the CPU.

    Every optimizer of ``torch.optim`` that takes sparse gradients accepts this gradient after `_coalesce_gradient`.
    """

    @staticmethod
    def forward(ctx: Any, weight_ND: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.shape, ctx.dtype, ctx.padding_idx = weight_ND.shape, weight_ND.dtype, padding_idx
        if _are_on_one_device(ids, weight_ND):
            _refuse_outside(ids, len(weight_ND))
            ctx.save_for_backward(ids)
            return functional.embedding(ids, weight_ND)
        host_ids_U, positions, rows_UD = _rows_at(weight_ND, ids)
        ctx.save_for_backward(positions, host_ids_U)
        return functional.embedding(positions, rows_UD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient_KD = gradient.reshape(-1, ctx.shape[1]).to(ctx.dtype)
        ids, *host_ids_U = ctx.saved_tensors
        if host_ids_U:
            ids_K, rows_KD = host_ids_U[0], _summed_on_device(ids, len(host_ids_U[0]), gradient_KD)
        else:
            ids_K, rows_KD = ids.flatten(), gradient_KD
        if ctx.padding_idx is not None:
            kept_K = ids_K != ctx.padding_idx
            ids_K, rows_KD = ids_K[kept_K], rows_KD[kept_K]
        return torch.sparse_coo_tensor(ids_K[None], rows_KD, ctx.shape, check_invariants=False), None, None


def _are_on_one_device(ids: Tensor, weight_ND: Tensor) -> bool:
    return ids.device == weight_ND.device


def _rows_at(weight_ND: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids (U,), the index of each id among these, and their rows (U, D).

    The distinct ids are on the host. The indices and rows are on the device of ``ids``.
    """
    ids_U, positions = torch.unique(ids, return_inverse=True)
    host_ids_U = ids_U.cpu()
    _refuse_outside(host_ids_U, len(weight_ND))
    shape, is_pinned = (len(host_ids_U), weight_ND.shape[1]), ids.device.type == "cuda"
    rows_UD = torch.empty(shape, dtype=weight_ND.dtype, pin_memory=is_pinned)
    torch.index_select(weight_ND, 0, host_ids_U, out=rows_UD)
    return host_ids_U, positions, rows_UD.to(ids.device, non_blocking=is_pinned)


def _summed_on_device(positions: Tensor, num_rows: int, gradient_KD: Tensor) -> Tensor:
    """Return the sum of the gradients of each distinct id, (U, D), computed on the device and moved to the host."""
    sums_UD: Tensor = torch.ops.aten.embedding_dense_backward(gradient_KD, positions.flatten(), num_rows, -1, False)
    return sums_UD.cpu()


def _coalesce_gradient(weight_ND: Tensor) -> None:
    """Coalesce the gradient of the table, in which a sum of several gradients repeats ids.

    A single gradient is coalesced, too, because autograd drops the flag that marks it as coalesced.
    """
    assert weight_ND.grad is not None
    weight_ND.grad = weight_ND.grad.coalesce()


def _table(
    path: Path | None, shape: mapped_memory.Shape, dtype: torch.dtype, fill: Callable[[Tensor], object]
) -> Tensor:
    """Return a new table filled by ``fill``, in memory or in a new file, or the table in an existing file."""
    if path is None:
        weight_ND = torch.empty(shape, dtype=dtype)
        fill(weight_ND)
        return weight_ND
    return mapped_memory.reopen(path, shape, dtype) if path.exists() else mapped_memory.create(path, shape, dtype, fill)


def _matrix(rows: NDArray[Any] | Tensor) -> Tensor:
    """Return the rows as a tensor on the CPU, without a copy if possible.

    Raises:
        InputError: if the rows are not a matrix of floats.
    """
    if isinstance(rows, np.ndarray):
        rows = torch.from_numpy(rows if rows.flags.writeable else _writable(rows))
    if rows.dim() != 2 or not rows.is_floating_point():
        raise InputError(f"cannot make a table of {rows.dtype} of shape {tuple(rows.shape)}: give a matrix of floats")
    return rows.detach().cpu()


def _writable(rows: NDArray[Any]) -> NDArray[Any]:
    """Return a writable array of the same rows: a copy-on-write map of the file if they are mapped, or else a copy."""
    root = rows
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or not isinstance(root.filename, str | os.PathLike):
        return rows.copy()
    with open(root.filename, "rb") as file:
        memory = copied_on_write(file.fileno())
    begin = root.offset + rows.ctypes.data - root.ctypes.data
    return np.ndarray(rows.shape, rows.dtype, memory, begin, rows.strides)


def _positive(num_rows: int, width: int) -> tuple[int, int]:
    if num_rows < 1 or width < 1:
        raise InputError(f"cannot make a table of {num_rows} rows of width {width}: give 1 or more of both")
    return num_rows, width


def _padding_row(padding_idx: int | None, num_rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise InputError(
            f"padding_idx {padding_idx} is not a row of a table of {num_rows:,} rows: give one from {-num_rows} to "
            f"{num_rows - 1}, or None"
        )
    return padding_idx % num_rows


def _refuse_outside(ids: Tensor, num_rows: int) -> None:
    if ids.numel() == 0:
        return
    lowest, highest = (int(end) for end in ids.aminmax())
    if lowest < 0 or highest >= num_rows:
        raise IndexError(
            f"ids from {lowest} to {highest} were looked up in a table of {num_rows:,} rows: map ids outside of 0 to "
            f"{num_rows - 1} to the id of unknown words, or make the table larger"
        )
