"""What a dispatch mode changes or does not see, put right while a training is traced or recorded.

Changed: gradients that autograd adds up in place, and zeros that its formulas fill, which would be tensors of their
own. Unseen: storages that are resized (``tensor.untyped_storage().resize_(...)`` from Python), as FSDP2 frees gathered
parameters and takes them back. Does NOT see what C++ resizes, nor tell apart a sum that an op of torch computes inside
its own backward formula, of a tensor only it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plimsoll.memory.lowering.base import Run

aten = torch.ops.aten
# Where several gradients arrive at one node, autograd's engine adds the later ones to the first, in place if nobody
# else holds it, which it tells by these counts; but never under a dispatch mode (`accumulate`, `can_accumulate_inplace`
# in torch/csrc/autograd/input_buffer.cpp). There would be a gradient too many at every residual connection. While the
# engine's sum is dispatched to Python: the buffer's own, and those of the call on its way here.
_OWN_REFERENCES = 4
# What a backward formula fills in place, but for tensors of a subclass and under a dispatch mode
# (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp), with the op that does so. A list of indices
# is one reference more.
_FILLED = {
    aten.index_add.default: (aten.index_add_.default, 4),
    aten.index_put.default: (aten.index_put_.default, 5),
    aten.scatter.src: (aten.scatter_.src, 4),
    aten.scatter_add.default: (aten.scatter_add_.default, 4),
}
# The tensor, and the object by which Python asks.
_OWN_STORAGE_REFERENCES = 2


def accumulating_in_place(run: Run) -> Run:
    """Wrap the function that executes an op: sums of gradients, and what fills zeros, go to their first operand."""

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
    """Call ``note`` with each storage that was resized while the block runs, in this process."""
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
