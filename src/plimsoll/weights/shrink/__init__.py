"""Ways to make a model smaller, one a module; `SHRINKERS` lists them in the order in which a chain applies them."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.weights.shrink._base import Calibration, Choices, Need, Shrinker, Stage, Subject
from plimsoll.weights.shrink.channels import Channels
from plimsoll.weights.shrink.heads import Heads
from plimsoll.weights.shrink.hidden import Hidden
from plimsoll.weights.shrink.layers import Layers
from plimsoll.weights.shrink.units import Units

_METHODS: tuple[Shrinker, ...] = (Layers(), Hidden(), Heads(), Channels(), Units())

SHRINKERS: Mapping[str, Shrinker] = {method.name: method for method in _METHODS}

__all__ = ["SHRINKERS", "Calibration", "Choices", "Need", "Shrinker", "Stage", "Subject"]
