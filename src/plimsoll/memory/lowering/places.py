"""Assignment of fake tensors to device or host memory, when both are traced as CPU tensors.

Host: tensors that user code makes without a device, batches from the data loader, and results of ``.cpu()``. An example
is ``torch.tensor(0.0)``, the step count of an optimizer. Results computed only from host tensors are also host tensors.

Device: all other tensors, including results of ``.to(...)`` and ``.cuda()``. User code may name ``"cuda"`` or take the
device of another tensor.

Not covered: ``.to("cpu")`` for a move to the host (use ``.cpu()``), and the rounding of pinned memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from plimsoll.device.off_device import MARK, is_marked, mark_outside
from plimsoll.memory.lowering.base import Run, tensors_in

_FACTORIES = {
    getattr(torch, name)
    for name in [
        *("tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor", "empty", "zeros", "ones", "full", "eye"),
        *("arange", "linspace", "logspace", "empty_strided", "tril_indices", "triu_indices"),
        *("rand", "randn", "randint", "randperm", "normal"),
    ]
}


class OnePlace(TorchFunctionMode):
    """Function mode that runs code for ``"cuda"`` on the CPU, for programs whose tensors are all on one device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call on the CPU."""
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _deep_copy(*args)
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(_known_device(arg) if _is_device(arg) else arg for arg in args)
        return func(*args, **_on_cpu(kwargs or {}))


class Places(TorchFunctionMode):
    """Function mode that tracks the memory of each tensor, and accepts ``"cuda"`` on a build of torch without CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._makes_on_host = False
        self._copies_to_host: bool | None = None  # destination of the current copy

    def put_on_host(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as being in host memory, and return it."""
        return mark_outside(tensor)

    def on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory."""
        return is_marked(tensor)

    def run_with(self, run: Run) -> Run:
        """Wrap a function that executes ops, so that results are in the same memory as the inputs."""

        def run_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
            if not tensors:  # ops on lists, as used by optimizers
                tensors = tensors_in(args)
            if self._copies_to_host is not None:
                makes_on_host = self._copies_to_host
            elif tensors:
                makes_on_host = _are_on_host(tensors)
            else:
                makes_on_host = self._makes_on_host
            result = run(op, args, kwargs)
            if makes_on_host:
                for leaf in tensors_in((result,)):
                    self.put_on_host(leaf)
            return result

        return run_in_place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Track the memory that the device of a call refers to, and run the call on the CPU."""
        kwargs = kwargs or {}
        if func not in _UNDERSTOOD or (func is Tensor.__deepcopy__ and not isinstance(args[0], FakeTensor)):
            return func(*args, **_on_cpu(kwargs))
        if func is Tensor.__deepcopy__:
            return _deep_copy(*args)
        if func in _FACTORIES:
            self._makes_on_host = kwargs.get("device") is None
            try:
                return func(*args, **_on_cpu(kwargs))
            finally:
                self._makes_on_host = False
        if func is Tensor.cuda:
            return self._moved(args[0])
        if func is Tensor.to:
            tensor = func(*(_known_device(arg) if _is_device(arg) else arg for arg in args), **_on_cpu(kwargs))
            is_told = kwargs.get("device") is not None or any(map(_is_device, args[1:]))
            return self._moved(tensor) if is_told else tensor
        return args[0] if self.on_host(args[0]) else self._copied(args[0], to_host=True)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device. If it is already there, keep the object, to which optimizers may refer."""
        return self._copied(tensor, to_host=False) if self.on_host(tensor) else tensor

    def _copied(self, tensor: Tensor, to_host: bool) -> Tensor:
        self._copies_to_host = to_host
        try:
            return tensor.clone()
        finally:
            self._copies_to_host = None


_CPU = torch.device("cpu")
_UNDERSTOOD = {Tensor.__deepcopy__, Tensor.cuda, Tensor.to, Tensor.cpu, *_FACTORIES}
"""Calls that `Places` interprets instead of running them unchanged."""


def _are_on_host(tensors: list[Tensor]) -> bool:
    for tensor in tensors:  # noqa: SIM110 -- called for each op, and a generator would dominate its time
        if isinstance(tensor, FakeTensor) and not hasattr(tensor, MARK):
            return False
    return True


def _deep_copy(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """Return a copy for ``copy.deepcopy``. torch's version needs an address, which not every fake tensor has."""
    if id(tensor) not in memo:
        copied: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            copied._is_param = True  # as torch marks parameters of other types
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str | int) and not isinstance(value, bool)


def _known_device(value: Any) -> Any:
    """Return a device that this build of torch supports in place of a CUDA device, which may be given as a number."""
    return _CPU if isinstance(value, int) or torch.device(value).type == "cuda" else value


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    return kwargs if device is None else {**kwargs, "device": _known_device(device)}
