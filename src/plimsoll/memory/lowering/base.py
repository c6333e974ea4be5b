"""Interface of a lowering: training code on fake CPU tensors runs the target's ops.

torch selects kernels by device. On CUDA, it uses other kernels for attention and dropout, cuDNN's recurrent layers,
`foreach` optimizers, and other autocast lists. A fake CUDA tensor cannot be trained on a CPU build of torch: autograd
ends the process. The trace therefore runs on fake CPU tensors. Meanwhile, ops that differ are replaced by the target's
ops, above autograd. Tensors saved for backward are then also the target's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.optim.optimizer as optimizer_module
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""``(op, args, kwargs) -> result``: how an op is executed."""

Made = Callable[[Any, Any], Iterable[Tensor]]
"""``(op, result) -> tensors``: the tensors among an op's results, in the order of their allocation."""

Note = Callable[[str, int, int], None]
"""``(text, low_bytes, high_bytes)``: records a modelled value, and by how many bytes the peak may differ."""


class Scratch(NamedTuple):
    """Sizes in bytes of a kernel's scratch memory, allocated before and after the results."""

    before: Sequence[int] = ()
    after: Sequence[int] = ()


NO_SCRATCH = Scratch()
_NESTED = (list, tuple)

ScratchBytes = Callable[[Any, tuple[Any, ...], dict[str, Any]], Scratch]
"""``(op, args, kwargs) -> sizes`` of the scratch memory that the target's kernel uses."""

Unwritten = Callable[[Any, tuple[Any, ...], Any], tuple[Tensor, int] | None]
"""``(op, args, result) -> (tensor, bytes)``: a tensor, and how many of its bytes no op ever writes."""


class Lowering(Protocol):
    """Replacements of traced ops for one kind of target."""

    name: str
    kind: Literal["cpu", "cuda"]
    device: str  # name of the device in training code

    def loaded(self, tensor: Tensor) -> Tensor:
        """Mark a fake batch tensor as being in the memory where a data loader puts it, and return it."""

    def active(self, note: Note) -> AbstractContextManager[None]:
        """Replace the ops that differ on the target until the context exits.

        ``note`` is called with each value that a model estimates.
        """

    def run_with(self, run: Run) -> Run:
        """Wrap the function that executes an op, so that results are as on the target."""

    def scratch_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch:
        """Return the sizes of the scratch memory that the target's kernel uses."""

    def made(self, op: Any, result: Any) -> Iterable[Tensor]:
        """Return the tensors among an op's results, in the order in which the target allocates them."""

    def unwritten(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """Return a result of an op and how many of its bytes no op ever writes; ``None`` if all bytes are written."""

    def on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor that an op has just made is in host memory while the training runs on a device."""


def tensors_of(op: Any, result: Any) -> Iterable[Tensor]:
    """Return the tensors among an op's results, in their order."""
    return tensors_in((result,))


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """Return the tensors in arguments or results, also those nested in lists and tuples."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _NESTED):
            found += tensors_in(value)
    return found


@contextmanager
def kernels_replaced(
    kernels: Mapping[str, Callable[..., Any]], keys: Sequence[str] = ("AutogradCPU", "CPU")
) -> Iterator[None]:
    """Replace the kernels of ``aten`` ops on CPU tensors, with and without autograd, until the context exits.

    Args:
        kernels: functions with the signature of the op, by the op's name (with its overload, if it has one).
        keys: dispatch keys.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():  # torch warns about replaced kernels, which are intended here
            warnings.filterwarnings("ignore", message=r"\s*Warning only once for all operators", category=UserWarning)
            for name, kernel in kernels.items():
                for key in keys:
                    library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        # The only way to remove kernels; torch's tests do the same.
        library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def foreach_as_on(device_types: tuple[str, ...]) -> Iterator[None]:
    """Make `foreach` the default of optimizers on the given devices, also for fake tensors, until the context exits.

    The default depends on the exact class of a parameter and on its device type. Both lists are private in torch.

    Args:
        device_types: devices on which `foreach` is the default.
    """
    classes = [module._foreach_supported_types for module in (optimizer_module, foreach_utils)]
    name = "_get_foreach_kernels_supported_devices"
    supported_devices = getattr(optimizer_module, name)
    for known in classes:
        known.append(FakeTensor)
    setattr(optimizer_module, name, lambda: list(device_types))
    try:
        yield
    finally:
        setattr(optimizer_module, name, supported_devices)
        for known in classes:
            known.remove(FakeTensor)


@contextmanager
def fake_modules_can_be_converted() -> Iterator[None]:
    """Make ``module.to(...)`` convert fake parameters in place, as real ones, until the context exits.

    For fake tensors, torch swaps whole tensor objects, which fails if an optimizer or a recorder refers to them.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in module.children():
                child._apply(convert)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in module._parameters.values():
                if parameter is not None:
                    _exchange(parameter, convert(parameter))
                    if parameter.grad is not None:
                        _exchange(parameter.grad, convert(parameter.grad))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = convert(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _exchange(tensor: Tensor, converted: Tensor) -> None:
    """Give a tensor the memory of its converted copy, and delete Plimsoll's notes on the old memory."""
    if converted is not tensor:
        tensor.data = converted
        for name in [name for name in vars(tensor) if name.startswith("_plimsoll")]:
            delattr(tensor, name)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # `at::linear` (aten/src/ATen/native/Linear.cpp) adds the bias in place if it cannot fuse multiplication and
    # addition. That is the case for a non-contiguous input of more than two dimensions, such as the output of a
    # recurrent layer with `batch_first`. For tensor subclasses, such as fake tensors, and under a dispatch mode, it
    # adds out of place.
    if bias is None or input.dim() == 2 or input.is_contiguous():
        result: Tensor = torch.ops.aten.linear.default.decompose(input, weight, bias)
        return result
    return torch.matmul(input, weight.t()).add_(bias)


LINEAR = {"linear": _linear}
