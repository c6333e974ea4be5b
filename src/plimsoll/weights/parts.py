"""The plain tensors of a weight: the weight itself, or the integers and scales of a weight quantized by torchao.

A quantized weight reports the type and shape of the original weight, which differ from the tensors in memory. Covers
every tensor subclass with ``__tensor_flatten__``. Does NOT import torchao.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def is_made_of_parts(tensor: Tensor) -> bool:
    """Return whether a tensor wraps other tensors, as quantized weights of torchao do."""
    return hasattr(type(tensor), "__tensor_flatten__")


def plain_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return by name the tensors that a tensor wraps; a plain tensor is returned under the name ``""``."""
    if not is_made_of_parts(tensor):
        return {"": tensor}
    whole: Any = tensor
    parts = {name: getattr(whole, name) for name in whole.__tensor_flatten__()[0]}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}  # a DTensor's mesh is not a tensor


def with_parts(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change`` to each tensor that a tensor wraps, or to a plain tensor itself, and return the result."""
    if not is_made_of_parts(tensor):
        return change(tensor)
    whole: Any = tensor
    names, facts = whole.__tensor_flatten__()
    parts = {name: change(getattr(whole, name)) for name in names}
    made: Tensor = type(tensor).__tensor_unflatten__(parts, facts, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return made


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that a weight takes in memory and in a file."""
    return sum(part.numel() * part.element_size() for part in plain_parts(tensor).values())


def model_bytes(model: nn.Module) -> int:
    """Return the bytes that a model's parameters take in memory, each counted once. Also works on the meta device."""
    return sum(stored_bytes(weight) for weight in model.parameters())


def replace_modules(model: nn.Module, made: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each module by ``made(module)``, under all its names. ``made`` returns ``None`` for modules that stay."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        other = made(module)
        if other is not None:
            model.set_submodule(name, other)


def cast_saved(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point weights and saved buffers of a model to another type, in place.

    Buffers that are not saved, such as rotary frequencies, keep the type that they have when the model is loaded.
    Quantized weights stay as they are, too.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not is_made_of_parts(tensor):
            tensor.data = tensor.data.to(dtype)
