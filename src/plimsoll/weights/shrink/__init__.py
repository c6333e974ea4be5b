"""Ways to make a model smaller, one a module; `SHRINKERS` lists them in the order in which a chain applies them."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.weights.shrink._base import Calibration, Choices, Need, Shrinker, Subject
from plimsoll.weights.shrink.bf16 import Bf16
from plimsoll.weights.shrink.channels import Channels
from plimsoll.weights.shrink.dynamic_int8 import DynamicInt8
from plimsoll.weights.shrink.float8 import Float8
from plimsoll.weights.shrink.heads import Heads
from plimsoll.weights.shrink.hidden import Hidden
from plimsoll.weights.shrink.int4 import Int4
from plimsoll.weights.shrink.int8 import Int8
from plimsoll.weights.shrink.int8_embeddings import Int8Embeddings
from plimsoll.weights.shrink.layers import Layers
from plimsoll.weights.shrink.low_rank import LowRank
from plimsoll.weights.shrink.low_rank_embeddings import LowRankEmbeddings
from plimsoll.weights.shrink.shared_layers import SharedLayers
from plimsoll.weights.shrink.tied import Tied
from plimsoll.weights.shrink.two_four import TwoFour
from plimsoll.weights.shrink.units import Units
from plimsoll.weights.shrink.unstructured import Unstructured
from plimsoll.weights.shrink.vocabulary import Vocabulary

_METHODS: tuple[Shrinker, ...] = (
    Vocabulary(),
    Layers(),
    Hidden(),
    Heads(),
    Channels(),
    Units(),
    SharedLayers(),
    LowRank(),
    LowRankEmbeddings(),
    Tied(),
    Unstructured(),
    TwoFour(),
    Bf16(),
    Int8Embeddings(),
    Int8(),
    Int4(),
    DynamicInt8(),
    Float8(),
)

SHRINKERS: Mapping[str, Shrinker] = {method.name: method for method in _METHODS}

__all__ = ["SHRINKERS", "Calibration", "Choices", "Need", "Shrinker", "Subject"]
