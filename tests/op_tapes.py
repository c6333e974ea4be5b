"""A stand-in for CUDA graphs on the CPU: operators are recorded as they run, and replayed on the same tensors.

As in a graph, kernels are replayed without Python. Numbers keep the values of the capture, tensors keep their
addresses, and random numbers are drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plimsoll.memory.dispatch_gaps import accumulating_in_place


class Op(NamedTuple):
    """A call with its results; kernels of recurrent layers depend on whether gradients were enabled."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: list[Tensor]
    has_grad: bool


class OpTape(TorchDispatchMode):
    """A CPU version of `plimsoll.step.cuda_graphs.capture.Graph`."""

    made: list[OpTape] = []

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.num_bytes, self.is_released = 1000, False
        self._run = accumulating_in_place(self._note)
        self.made.append(self)

    def capture(self, work: Callable[[], Any]) -> Any:
        with self:
            return work()

    def replay(self) -> None:
        assert not self.is_released
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, returned, has_grad in self.ops:
                with torch.set_grad_enabled(has_grad):
                    again = tensors_of(func(*args, **kwargs))
                for old, new in zip(returned, again, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def release(self) -> None:
        self.is_released = True
        self.ops.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = torch._C._current_autograd_node()
        if func is torch.ops.aten.add.Tensor and node is not None and node.name() == "torch::autograd::AccumulateGrad":
            return self._note(torch.ops.aten.add_.Tensor, args, {})  # out of place under a dispatch mode
        return self._run(func, args, kwargs or {})

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self.ops.append(Op(func, args, kwargs, tensors_of(result), torch.is_grad_enabled()))
        return result


def tensors_of(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
