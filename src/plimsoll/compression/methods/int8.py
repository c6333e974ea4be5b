"""Linear weights in 8 bits, a scale for each row (torchao's ``Int8WeightOnlyConfig``); the arithmetic stays as it is.

The integers are decoded again in every pass, a layer after the other: a quarter of the file and of the memory that
weights lie in, and no less time. Does NOT cover the head and embeddings.
"""

from __future__ import annotations

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.weights.torchao_layers import int8_config, plain_layers, quantize_layers, why_not_linear


class Int8(Shrinker):
    """See the module."""

    name = "int8"
    saves = (
        "the file and the memory of the linear weights fall to a quarter of float32; a pass is no faster, since "
        "a layer is decoded whole while it computes, so that with many tokens the peak falls by less than the weights; "
        "the head and the embeddings stay; it cannot be trained"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Refuse models without linear layers, and what torchao cannot do."""
        return why_not_linear(bundle.model, self.name)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Quantize the linear layers of the base model."""
        quantize_layers(bundle.model, [*plain_layers(bundle.model)], int8_config())
