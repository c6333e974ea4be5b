"""Layers that share their parameters, as in ALBERT: neighbouring layers form a group that is saved once.

The parameters of a group are its first layer's, or the mean over its layers (``start=mean``, which was worse in most
measurements: docs/shrink/shared_layers.md). A model that was trained with separate layers can lose nearly all of its
quality, and needs further training. ALBERT (Lan et al. 2019, arXiv:1909.11942) shares parameters from the start of
training. The module objects stay separate, so caches of keys and values work.

Does NOT reduce the time or activations of a pass, since the number of computed layers does not change. Not handled:
models with layers of different sizes, and recurrent layers.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.layers import is_of_transformers, layer_list
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of
from plimsoll.weights.structure import note, use_parameters_of


class SharedLayers(Shrinker):
    """Sharing of parameters by neighbouring layers."""

    name = "shared_layers"
    saves = (
        "the file, and the memory of weights, gradients and optimizer states, by the share of layers that reuse "
        "parameters; activations and inference time are unchanged, because as many layers run as before"
    )
    tried = ({"groups": 2}, {"groups": 1})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why layers cannot be shared: no layers, or layers of different shapes; else ``None``."""
        model = bundle.model
        found = layer_list(model) if is_of_transformers(model) else None
        if found is None:
            return (
                f"{type(model).__name__} has no list of layers: looked for an nn.ModuleList of modules of one class in "
                "a transformers model; use `units` for recurrent models"
            )
        name, layers = found
        groups: Any = options_of(choice)["groups"]
        if len(layers) <= groups:
            return f"{name} has {len(layers)} layers, so {groups} groups save nothing: give fewer groups"
        return _layers_fault(name, layers)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Share one set of parameters in each group of layers."""
        found = layer_list(bundle.model)
        assert found is not None, "it was not refused"
        name, layers = found
        options: Any = options_of(choice)
        for group in _groups(len(layers), options["groups"]):
            if options["start"] == "mean":
                _take_mean([layers[number] for number in group])
            for number in group[1:]:
                use_parameters_of(layers[group[0]], layers[number])
        for group in _groups(len(layers), options["groups"]):
            for number in group[1:]:
                note(bundle.model, "shared", f"{name}.{number}", f"{name}.{group[0]}")


def _layers_fault(name: str, layers: nn.ModuleList) -> str | None:
    shapes = [[(inner, value.shape) for inner, value in layer.named_parameters()] for layer in layers]
    if any(one != shapes[0] for one in shapes):
        return f"the {len(layers)} layers of {name} differ in size: use `layers` to remove some"
    if len({id(value) for value in layers.parameters()}) < sum(map(len, shapes)):
        return f"the {len(layers)} layers of {name} already share parameters: leave `shared_layers` out"
    return None


def _groups(num_layers: int, num_groups: int) -> list[list[int]]:
    """Return the layer indices in groups of neighbours. The first groups are larger by one if there is a remainder."""
    least, more = divmod(num_layers, num_groups)
    begins = [number * least + min(number, more) for number in range(num_groups + 1)]
    return [[*range(begin, end)] for begin, end in itertools.pairwise(begins)]


@torch.no_grad()
def _take_mean(layers: list[nn.Module]) -> None:
    others = [dict(layer.named_parameters()) for layer in layers[1:]]
    for name, value in layers[0].named_parameters():
        for other in others:
            value.add_(other[name])
        value.div_(len(layers))
