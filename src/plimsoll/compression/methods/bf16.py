"""All weights in bfloat16: half the bytes of float32, and products in it.

The exponent stays as wide as in float32, the fraction falls from 23 bits to 7. Folders load by ``from_pretrained``,
which reads the type from the configuration; a recurrent model is of the type that its file has. Does NOT cover models
that are in 16 bits already, and those with quantized weights, which decode to the type that they had.
"""

from __future__ import annotations

from typing import Any

import torch

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.weights.parts import cast_saved, is_made_of_parts


class Bf16(Shrinker):
    """See the module."""

    name = "bf16"
    saves = (
        "the file and the memory of all weights, and of what is computed with them, fall to a half of float32; the "
        "time of a pass falls where the processor multiplies in bfloat16, and rises where it does not"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Refuse models of which nothing is wider."""
        model = bundle.model
        if not hasattr(model, "config"):
            return f"{type(model).__name__} has no configuration that could say its type: looked for `config`"
        coded = [name for name, one in model.named_parameters() if is_made_of_parts(one)]
        if coded:
            return (
                f"{self.name}: {coded[0]} is quantized and stays as it is: do {self.name} before that, or leave it out"
            )
        wide = [one for one in model.parameters() if one.dtype in {torch.float32, torch.float64}]
        return None if wide else f"no weight of {type(model).__name__} is wider than 16 bits: leave it out"

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Round all weights."""
        model: Any = bundle.model
        cast_saved(model, torch.bfloat16)
        if hasattr(model, "base_model_prefix"):  # of transformers; a recurrent model is of the type of its file
            model.config.dtype = torch.bfloat16
