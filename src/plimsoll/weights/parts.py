"""The tensors that a weight is made of: itself, or where torchao made integers of it the integers and their scales.

A weight of torchao says of itself that it has the type and the shape it had before, which is not what lies in memory.
Covers every tensor subclass that can be taken apart (``__tensor_flatten__``). Does NOT import torchao.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def is_made_of_parts(tensor: Tensor) -> bool:
    """Whether a tensor is a wrapper around others, as the quantized weights of torchao are."""
    return hasattr(type(tensor), "__tensor_flatten__")


def plain_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return what a tensor is made of, by the names of its parts; of a plain tensor itself, without a name."""
    if not is_made_of_parts(tensor):
        return {"": tensor}
    whole: Any = tensor
    parts = {name: getattr(whole, name) for name in whole.__tensor_flatten__()[0]}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}  # a DTensor's mesh is none


def with_parts(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor like a wrapper, each part of it changed, or a plain tensor changed."""
    if not is_made_of_parts(tensor):
        return change(tensor)
    whole: Any = tensor
    names, facts = whole.__tensor_flatten__()
    parts = {name: change(getattr(whole, name)) for name in names}
    made: Tensor = type(tensor).__tensor_unflatten__(parts, facts, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return made


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a weight as it lies in memory and in a file."""
    return sum(part.numel() * part.element_size() for part in plain_parts(tensor).values())


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters as they lie in memory, each once; on the meta device too."""
    return sum(stored_bytes(weight) for weight in model.parameters())


def replace_modules(model: nn.Module, made: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put others in the place of modules, at every name they have; ``made`` returns ``None`` of those that stay."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        other = made(module)
        if other is not None:
            model.set_submodule(name, other)


def cast_saved(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the weights of a model, and the buffers that are saved with them, another type; others stay as they are.

    What a model computes for itself, such as rotary frequencies, is then of the type that it has when the model is
    loaded. Weights that are made of parts stay, too.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not is_made_of_parts(tensor):
            tensor.data = tensor.data.to(dtype)
