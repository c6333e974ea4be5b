"""Linear weights in 8 bits, with a scale per row (torchao's ``Int8WeightOnlyConfig``). The arithmetic does not change.

Each layer's integers are decoded in every pass. The file and the memory of these weights fall to a quarter of float32;
the time of a pass does not fall. Not handled: the head and embeddings.
"""

from __future__ import annotations

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.weights.torchao_layers import int8_config, plain_layers, quantize_layers, why_not_linear


class Int8(Shrinker):
    """Quantization of linear weights to 8 bits."""

    name = "int8"
    saves = (
        "linear weights take a quarter of float32, in the file and in memory; inference is not faster; each layer "
        "is decoded when it runs, so with many tokens the peak shrinks less than the weights; the head and the "
        "embeddings are unchanged; the model cannot be trained"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why weights cannot be quantized; ``None`` if they can."""
        return why_not_linear(bundle.model, self.name)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Quantize the linear layers of the base model."""
        quantize_layers(bundle.model, [*plain_layers(bundle.model)], int8_config())
