"""Which layers of a model get zeros, and when none can."""

from __future__ import annotations

from typing import Any

from plimsoll.records.plan import Choice
from plimsoll.weights.shrink._base import Subject
from plimsoll.weights.shrink._torchao import nothing_found, plain_layers, unknown_options


def layers_of(model: Any) -> dict[str, Any]:
    """Return the dense linear layers of the base model, by name; of those that share a weight the first."""
    found: dict[int, tuple[str, Any]] = {}
    for name, layer in plain_layers(model).items():
        found.setdefault(id(layer.weight), (name, layer))
    return dict(found.values())


def why_no_zeros(subject: Subject, choice: Choice, **defaults: float) -> str | None:
    """Return why a choice of zeros cannot be: an option there is not, a share that is none, no layer."""
    fault = unknown_options(choice, **dict.fromkeys(defaults, float))
    if fault is not None:
        return fault
    share = choice.options.get("share")
    if share is not None and not 0 < float(share) < 1:
        return f"{choice}: a share of {share:g} leaves all or nothing: give one between 0 and 1, such as 0.5"
    model: Any = subject.model
    if not hasattr(model, "base_model_prefix"):
        return f"{choice.technique} is for models of transformers, and this is a {type(model).__name__}: leave it out"
    return None if plain_layers(model) else nothing_found(model, choice.technique)
