"""Gradients that autograd adds up in place, although a trace sees a sum of its own.

Where several gradients arrive at one node, autograd's engine adds the later ones to the first, in place if nobody else
holds it; but never where a dispatch mode is active, as it is while a training is traced or recorded (``accumulate`` and
``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp). There would thus be a gradient too many at every
residual connection, and that of the largest matrix once more where an embedding is tied to the output.

Likewise torch's backward formulas of indexing fill the zeros that they have made, in place, but for tensors of a
subclass and under a dispatch mode (``areAnyTensorSubclassLike`` in torch/csrc/autograd/FunctionsManual.cpp).

Whether a gradient is held elsewhere is told by torch's own reference counts, which are what the engine looks at. Not
told apart: a sum that an op of torch computes inside its own backward formula, of a tensor only it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plimsoll.memory.lowering.base import Run

aten = torch.ops.aten
# While the engine's sum is dispatched to Python: the buffer's own, and those of the call on its way here.
_OWN_REFERENCES = 4
# What a formula fills, with the op that does it in place. A list of indices is one reference more.
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
