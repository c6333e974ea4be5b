"""Placement of a model when it is built and moved to its device, if the device may not hold the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.off_device import mark_outside
from plimsoll.records.plan import Choice
from plimsoll.techniques import technique_of
from plimsoll.techniques.mechanisms.pinned import PinnedPool


def builds_outside(choices: Iterable[Choice], device: Literal["cpu", "cuda"]) -> bool:
    """Return whether one of these choices builds the model outside the memory of its device."""
    return any(technique_of(choice.technique).builds_outside(choice, device) for choice in choices)


def put_where_needed(model: nn.Module, device: str, choices: Iterable[Choice]) -> None:
    """Move a model to a device, except for parameters that a choice keeps on the host."""
    kept = [technique_of(choice.technique).kept_on_host(choice, model) for choice in choices]
    stay = {parameter for parameters in kept for parameter in parameters}
    places = [
        (part._parameters, key, parameter)
        for part in model.modules()
        for key, parameter in part._parameters.items()
        if parameter in stay
    ]
    try:
        for parameters, key, _ in places:
            parameters[key] = None
        model.to(device)
    finally:
        for parameters, key, parameter in places:
            parameters[key] = parameter
    pool, target = PinnedPool(), torch.device(device)
    for parameter in stay:
        if target.type == "cuda" and not isinstance(parameter, FakeTensor):
            parameter.data = pool.copy_of(parameter, target)
        mark_outside(parameter)
