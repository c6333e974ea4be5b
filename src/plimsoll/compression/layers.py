"""Lookup of a model's blocks and linear layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from plimsoll.compression.base import Bundle
from plimsoll.records.plan import Choice
from plimsoll.weights.torchao_layers import nothing_found, plain_layers


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the name and the list of a model's blocks: the longest `nn.ModuleList` of modules of one class.

    Return ``None`` if the model has no such list.
    """
    found: tuple[str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len({type(one) for one in module}) == 1
        if is_list and (found is None or len(module) > len(found[1])):
            found = (name, module)
    return found


def linears_of_blocks(model: nn.Module) -> list[str]:
    """Return the names of the linear layers inside blocks, in the order of the model; see `is_linear`."""
    return [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if is_linear(module) and any(part.isdecimal() for part in name.split("."))
    ]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer: torch's Linear, or Conv1D of transformers."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def linear_weight(module: Any) -> Any:
    """Return the weight of a linear layer as a view (out, in)."""
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is a transformers model, recognised by its configuration."""
    return hasattr(getattr(model, "config", None), "get_text_config")


def dense_layers(model: Any) -> dict[str, Any]:
    """Return the unquantized linear layers of the base model by name; only the first of layers that share a weight."""
    found: dict[int, tuple[str, Any]] = {}
    for name, layer in plain_layers(model).items():
        found.setdefault(id(layer.weight), (name, layer))
    return dict(found.values())


def why_no_zeros(bundle: Bundle, choice: Choice) -> str | None:
    """Return why weights cannot be set to zero; ``None`` if they can.

    The model must be from transformers, and must have an unquantized linear layer.
    """
    model: Any = bundle.model
    if not hasattr(model, "base_model_prefix"):
        return f"{choice.technique} needs a transformers model, and this is a {type(model).__name__}: leave it out"
    return None if plain_layers(model) else nothing_found(model, choice.technique)
