"""Ways to make a model smaller, one a module; `SHRINKERS` lists them in the order in which a chain applies them."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.weights.shrink._base import Calibration, Choices, Need, Shrinker, Stage, Subject
from plimsoll.weights.shrink.channels import Channels
from plimsoll.weights.shrink.layers import Layers

_METHODS: tuple[Shrinker, ...] = (Layers(), Channels())

SHRINKERS: Mapping[str, Shrinker] = {method.name: method for method in _METHODS}

__all__ = ["SHRINKERS", "Calibration", "Choices", "Need", "Shrinker", "Stage", "Subject"]
