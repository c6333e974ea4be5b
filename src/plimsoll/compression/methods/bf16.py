"""All weights and their arithmetic in bfloat16: half the bytes of float32.

The exponent is as wide as in float32; the fraction has 7 instead of 23 bits. ``from_pretrained`` reads the data type
from the configuration. A recurrent model of Plimsoll is loaded in the data type of its file.

Not handled: models that are already in 16 bits, and models with quantized weights, which would still be decoded to
their previous data type.
"""

from __future__ import annotations

from typing import Any

import torch

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.weights.parts import cast_saved, is_made_of_parts


class Bf16(Shrinker):
    """Conversion of all weights to bfloat16."""

    name = "bf16"
    saves = (
        "weights and activations take half of float32, in the file and in memory; inference is faster only on "
        "processors with bfloat16 arithmetic, otherwise slower"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why the weights cannot be converted, for example because none is wider than 16 bits; else ``None``."""
        model = bundle.model
        if not hasattr(model, "config"):
            return f"{type(model).__name__} has no configuration to store its type: looked for `config`"
        coded = [name for name, one in model.named_parameters() if is_made_of_parts(one)]
        if coded:
            return (
                f"{self.name}: {coded[0]} is quantized and cannot be converted: use {self.name} first, or leave it out"
            )
        wide = [one for one in model.parameters() if one.dtype in {torch.float32, torch.float64}]
        return None if wide else f"no weight of {type(model).__name__} is wider than 16 bits: leave it out"

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Round all weights to bfloat16."""
        model: Any = bundle.model
        cast_saved(model, torch.bfloat16)
        if hasattr(model, "base_model_prefix"):  # a recurrent model gets the data type of its file
            model.config.dtype = torch.bfloat16
