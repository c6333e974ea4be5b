"""Ways to make a model smaller, one a module; `SHRINKERS` lists them in the order in which a chain applies them."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.weights.shrink._base import Calibration, Choices, Need, Shrinker, Stage, Subject
from plimsoll.weights.shrink.low_rank import LowRank
from plimsoll.weights.shrink.low_rank_embeddings import LowRankEmbeddings
from plimsoll.weights.shrink.shared_layers import SharedLayers
from plimsoll.weights.shrink.tied import Tied
from plimsoll.weights.shrink.vocabulary import Vocabulary

_METHODS: tuple[Shrinker, ...] = (
    Vocabulary(),
    SharedLayers(),
    LowRank(),
    LowRankEmbeddings(),
    Tied(),
)

SHRINKERS: Mapping[str, Shrinker] = {method.name: method for method in _METHODS}

__all__ = ["SHRINKERS", "Calibration", "Choices", "Need", "Shrinker", "Stage", "Subject"]
