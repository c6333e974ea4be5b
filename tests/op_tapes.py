"""A stand-in for CUDA graphs on the CPU: operators are noted as they run, and run again on the same tensors.

As a graph does, it replays kernels and no Python: numbers are those of the capture, tensors lie where they lay, and
random numbers are drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plimsoll.memory.accumulate import accumulating_in_place


class OpTape(TorchDispatchMode):
    """`plimsoll.run.captured.Graph` for a CPU."""

    made: list[OpTape] = []

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._run = accumulating_in_place(self._note)
        self.is_released = False
        self.made.append(self)

    def capture(self, work: Callable[[], Any]) -> Any:
        with self:
            return work()

    @torch.no_grad()
    def replay(self) -> None:
        assert not self.is_released
        for func, args, kwargs, kept in self._ops:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(kept, again, strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def release(self) -> None:
        self.is_released = True
        self._ops.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = torch._C._current_autograd_node()
        if func is torch.ops.aten.add.Tensor and node is not None and node.name() == "torch::autograd::AccumulateGrad":
            return self._note(torch.ops.aten.add_.Tensor, args, {})  # which under a dispatch mode it does out of place
        return self._run(func, args, kwargs or {})

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self._ops.append((func, args, kwargs, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result
