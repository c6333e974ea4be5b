"""What every lowering offers: how a training that is traced on fake CPU tensors becomes the one the target runs.

torch picks kernels by device: on CUDA another attention, another dropout, cuDNN's recurrent nets, `foreach` optimizers,
other autocast lists. A fake CUDA tensor cannot be trained on a CPU build of torch (autograd ends the process), so the
trace runs on fake CPU tensors, and while it does, the ops that differ are replaced by what the target calls, above
autograd, so that what is saved for backward is the target's too.
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
"""``(op, result) -> tensors``: those among an op's results, in the order in which they are allocated."""

Note = Callable[[str, int, int], None]
"""``(text, low_bytes, high_bytes)``: something was modelled, and the peak may differ by so much."""


class Scratch(NamedTuple):
    """The sizes in bytes of what a kernel takes beside its results, before and after it allocates these."""

    before: Sequence[int] = ()
    after: Sequence[int] = ()


NO_SCRATCH = Scratch()
_NESTED = (list, tuple)

ScratchBytes = Callable[[Any, tuple[Any, ...], dict[str, Any]], Scratch]
"""``(op, args, kwargs) -> sizes`` of what the target's kernel takes while it runs, beside its results."""

Unwritten = Callable[[Any, tuple[Any, ...], Any], tuple[Tensor, int] | None]
"""``(op, args, result) -> (tensor, bytes)``: a tensor of which no op ever writes so many bytes, if there is one."""


class Lowering(Protocol):
    """One kind of target."""

    name: str
    kind: Literal["cpu", "cuda"]
    device: str  # what a training says to get there

    def loaded(self, tensor: Tensor) -> Tensor:
        """Let a fake tensor be where a loader puts it."""

    def active(self, note: Note) -> AbstractContextManager[None]:
        """Replace what the target does otherwise; undone on exit."""

    def run_with(self, run: Run) -> Run:
        """Wrap the function that executes an op."""

    def scratch_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch:
        """Give the sizes of what the target's kernel takes while it runs, beside its results."""

    def made(self, op: Any, result: Any) -> Iterable[Tensor]:
        """Return the tensors among an op's results, in the order in which the target allocates them."""

    def unwritten(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """Say of which tensor among an op's results no op ever writes so many bytes, if there is one."""

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor that an op has just made is in the host's memory, and the training elsewhere."""


def tensors_of(op: Any, result: Any) -> Iterable[Tensor]:
    """Return the tensors among an op's results, in their order."""
    return tensors_in((result,))


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """Return the tensors among what an op takes or gives, which are nested in lists at most."""
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
    """Let other functions do what ``aten`` ops do on CPU tensors, with and without autograd; undone on exit.

    Args:
        kernels: functions with the op's signature, by the op's name (with its overload, if it has one).
        keys: of torch's tables of kernels.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():  # torch warns of a kernel that is replaced, which is the purpose
            warnings.filterwarnings("ignore", message=r"\s*Warning only once for all operators", category=UserWarning)
            for name, kernel in kernels.items():
                for key in keys:
                    library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        # The one way to take kernels back; torch's own tests use it.
        library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def foreach_as_on(device_types: tuple[str, ...]) -> Iterator[None]:
    """Let optimizers default to `foreach` as they do on some devices, also for fake tensors; undone on exit.

    It depends on the exact class of a parameter and on the type of its device; both lists are private.

    Args:
        device_types: the devices on which it is the default.
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
    """Let ``module.to(...)`` convert fake parameters in place, as it does real ones; undone on exit.

    torch exchanges whole tensor objects there, which it refuses where an optimizer or a recorder refers to them.
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
    """Give a tensor the memory of another, and what is known of it."""
    if converted is not tensor:
        tensor.data = converted
        for name in [name for name in vars(tensor) if name.startswith("_plimsoll")]:
            delattr(tensor, name)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # `at::linear` (aten/src/ATen/native/Linear.cpp) adds the bias in place where it cannot multiply and add at once:
    # where its input has more than two dimensions and is not contiguous, as the output of a recurrent layer with
    # `batch_first`. For tensors of a subclass, as fake ones are, and under a dispatch mode it adds out of place.
    if bias is None or input.dim() == 2 or input.is_contiguous():
        result: Tensor = torch.ops.aten.linear.default.decompose(input, weight, bias)
        return result
    return torch.matmul(input, weight.t()).add_(bias)


LINEAR = {"linear": _linear}
