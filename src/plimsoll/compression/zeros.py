"""Which layers of a model get zeros, and when none can."""

from __future__ import annotations

from typing import Any

from plimsoll.compression.base import Bundle
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_fault
from plimsoll.weights.torchao_layers import nothing_found, plain_layers


def layers_of(model: Any) -> dict[str, Any]:
    """Return the dense linear layers of the base model, by name; of those that share a weight the first."""
    found: dict[int, tuple[str, Any]] = {}
    for name, layer in plain_layers(model).items():
        found.setdefault(id(layer.weight), (name, layer))
    return dict(found.values())


def why_no_zeros(bundle: Bundle, choice: Choice) -> str | None:
    """Return why a choice of zeros cannot be: an option there is not, a share that is none, no layer."""
    fault = options_fault(choice)
    if fault is not None:
        return fault
    model: Any = bundle.model
    if not hasattr(model, "base_model_prefix"):
        return f"{choice.technique} is for models of transformers, and this is a {type(model).__name__}: leave it out"
    return None if plain_layers(model) else nothing_found(model, choice.technique)
