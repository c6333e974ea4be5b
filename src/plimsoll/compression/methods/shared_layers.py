"""Layers that share their parameters, as ALBERT's do: neighbours become a group that is saved once.

The parameters of a group are those of its first layer, or the mean of all (``start=mean``, which was worse in most of
what was measured: docs/shrink/shared_layers.md). A model that was trained with layers of its own can lose nearly all
that it has learned by this, and needs to be trained on (Lan et al. 2019, arXiv:1909.11942 train from the start). The
module objects stay apart, so caches of keys and values work.

It does NOT make a pass or its activations smaller: as many layers are computed as before. It does not cover models
whose layers differ in their sizes, and recurrent layers.
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
    """Neighbouring layers get one set of parameters."""

    name = "shared_layers"
    saves = (
        "the file, the memory of the weights and of a training's gradients and optimizer states, by the layers that "
        "have none of their own; not activations, and not time: as many layers are computed as before"
    )
    tried = ({"groups": 2}, {"groups": 1})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why this cannot be: no layers, or layers of several shapes."""
        model = bundle.model
        found = layer_list(model) if is_of_transformers(model) else None
        if found is None:
            return (
                f"no list of layers: looked for an nn.ModuleList of modules of one class in a {type(model).__name__} "
                "of transformers; use `units` for recurrent models"
            )
        name, layers = found
        groups: Any = options_of(choice)["groups"]
        if len(layers) <= groups:
            return f"{name} has {len(layers)} layers, which {groups} groups do not make fewer: give fewer groups"
        return _layers_fault(name, layers)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Give the layers of each group one set of parameters."""
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
        return f"the {len(layers)} layers of {name} have not all the same sizes: use `layers` to take some away"
    if len({id(value) for value in layers.parameters()}) < sum(map(len, shapes)):
        return f"the {len(layers)} layers of {name} share parameters already: leave `shared_layers` out"
    return None


def _groups(num_layers: int, num_groups: int) -> list[list[int]]:
    """Neighbours, as many in each group as can be; the first groups have those that are left over."""
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
