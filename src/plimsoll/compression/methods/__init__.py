"""Compression methods, one per module. `SHRINKERS` lists them in the order in which a chain applies them."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.compression.base import Bundle, Calibration, Choices, Need, Shrinker
from plimsoll.compression.methods.bf16 import Bf16
from plimsoll.compression.methods.channels import Channels
from plimsoll.compression.methods.dynamic_int8 import DynamicInt8
from plimsoll.compression.methods.float8 import Float8
from plimsoll.compression.methods.heads import Heads
from plimsoll.compression.methods.hidden import Hidden
from plimsoll.compression.methods.int4 import Int4
from plimsoll.compression.methods.int8 import Int8
from plimsoll.compression.methods.int8_embeddings import Int8Embeddings
from plimsoll.compression.methods.layers import Layers
from plimsoll.compression.methods.low_rank import LowRank
from plimsoll.compression.methods.low_rank_embeddings import LowRankEmbeddings
from plimsoll.compression.methods.shared_layers import SharedLayers
from plimsoll.compression.methods.tied import Tied
from plimsoll.compression.methods.two_four import TwoFour
from plimsoll.compression.methods.units import Units
from plimsoll.compression.methods.unstructured import Unstructured
from plimsoll.compression.methods.vocabulary import Vocabulary

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

__all__ = ["SHRINKERS", "Bundle", "Calibration", "Choices", "Need", "Shrinker"]
