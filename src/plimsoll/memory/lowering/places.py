"""Which fake tensors stand for memory of the device and which for the host's, when both are traced as CPU tensors.

Host: what user code makes without saying a device (``torch.tensor(0.0)``, as optimizers count their steps), batches as
the loader gives them, what ``.cpu()`` returns, and what is computed from these alone. Device: everything else, also
what ``.to(...)`` and ``.cuda()`` return; user code may say ``"cuda"`` or a device taken from another tensor.

Not covered: a ``.to("cpu")`` that is meant to move to the host (say ``.cpu()``), and pinned memory's rounding.
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
    """Lets code that says ``"cuda"`` run on the CPU, where there is one place only."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do the call on the CPU."""
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _deep_copy(*args)
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(_known_device(arg) if _is_device(arg) else arg for arg in args)
        return func(*args, **_on_cpu(kwargs or {}))


class Places(TorchFunctionMode):
    """Follows where tensors are; while active, ``"cuda"`` is understood on a build of torch without it."""

    def __init__(self) -> None:
        super().__init__()
        self._makes_on_host = False
        self._copies_to_host: bool | None = None  # where the copy that is being made goes

    def put_on_host(self, tensor: Tensor) -> Tensor:
        """Say that a tensor is in the host's memory."""
        return mark_outside(tensor)

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the host's memory."""
        return is_marked(tensor)

    def run_with(self, run: Run) -> Run:
        """Let what an op makes be where its inputs are."""

        def run_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
            if not tensors:  # ops over lists, as optimizers use them
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
        """Understand what a call says of devices, and do the call."""
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
        """The tensor on the device: itself if it is there. A parameter stays the object that optimizers know."""
        return self._copied(tensor, to_host=False) if self.on_host(tensor) else tensor

    def _copied(self, tensor: Tensor, to_host: bool) -> Tensor:
        self._copies_to_host = to_host
        try:
            return tensor.clone()
        finally:
            self._copies_to_host = None


_CPU = torch.device("cpu")
_UNDERSTOOD = {Tensor.__deepcopy__, Tensor.cuda, Tensor.to, Tensor.cpu, *_FACTORIES}
"""Calls that `Places` does otherwise than they are said."""


def _are_on_host(tensors: list[Tensor]) -> bool:
    for tensor in tensors:  # noqa: SIM110 -- asked of each op, and a generator takes as long as all else
        if isinstance(tensor, FakeTensor) and not hasattr(tensor, MARK):
            return False
    return True


def _deep_copy(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` makes: torch's own asks for an address, which not every fake tensor has."""
    if id(tensor) not in memo:
        copied: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            copied._is_param = True  # as torch marks those of other types
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str | int) and not isinstance(value, bool)


def _known_device(value: Any) -> Any:
    """A device of this build of torch in place of CUDA, which a number means too."""
    return _CPU if isinstance(value, int) or torch.device(value).type == "cuda" else value


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    return kwargs if device is None else {**kwargs, "device": _known_device(device)}
