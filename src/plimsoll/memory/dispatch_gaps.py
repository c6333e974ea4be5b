"""Corrections for effects of dispatch modes on a traced or recorded training.

A dispatch mode changes in-place accumulation of gradients and in-place filling of zeros: they become out of place. It
does not see storages that Python code resizes with ``tensor.untyped_storage().resize_(...)``. FSDP2 frees and
reallocates gathered parameters in this way.

Does NOT see storages resized in C++. An in-place sum inside a backward formula of torch, on a tensor without other
references, cannot be distinguished from accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plimsoll.memory.lowering.base import Run

aten = torch.ops.aten
# If several gradients arrive at one node, autograd's engine adds the later ones to the first. It adds in place if there
# are no other references, but never under a dispatch mode (`accumulate`, `can_accumulate_inplace` in
# torch/csrc/autograd/input_buffer.cpp). The trace would then have an extra gradient at every residual connection. This
# is the reference count while the engine's sum is dispatched to Python: the buffer and the references of the call.
_OWN_REFERENCES = 4
# Ops that a backward formula runs in place, with the in-place op and its reference count. For tensor subclasses and
# under a dispatch mode, they run out of place (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp).
# A list of indices adds one reference.
_FILLED = {
    aten.index_add.default: (aten.index_add_.default, 4),
    aten.index_put.default: (aten.index_put_.default, 5),
    aten.scatter.src: (aten.scatter_.src, 4),
    aten.scatter_add.default: (aten.scatter_add_.default, 4),
}
# The tensor, and the Python object used for the query.
_OWN_STORAGE_REFERENCES = 2


def accumulating_in_place(run: Run) -> Run:
    """Wrap the function that executes an op, so that autograd's gradient sums and fills of zeros run in place."""

    def run_accumulating(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return run(op, args, kwargs)
        if op is aten.add.Tensor and not kwargs and _is_engines_own(*args):
            run(aten.add_.Tensor, args, kwargs)
            return args[0]
        if op in _FILLED and _is_held_once(args[0], _FILLED[op][1]):
            run(_FILLED[op][0], args, kwargs)
            return args[0]
        return run(op, args, kwargs)

    return run_accumulating


def _is_engines_own(first: Any, second: Any) -> bool:
    return (
        isinstance(second, Tensor)
        and first.layout is torch.strided
        and second.layout is torch.strided
        and first.shape == second.shape
        and _is_held_once(first, _OWN_REFERENCES)
        and torch._prims_common.is_non_overlapping_and_dense_or_false(first)
    )


def _is_held_once(tensor: Any, references: int) -> bool:
    return bool(
        tensor._use_count() == references
        and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _OWN_STORAGE_REFERENCES
    )


@contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``note`` with each storage that Python code resizes while the block runs."""
    inherited = "resize_" not in vars(torch.UntypedStorage)
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = before(storage, num_bytes)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if inherited:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]
