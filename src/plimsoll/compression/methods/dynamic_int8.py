"""Linear layers that compute in 8 bits: weights with a scale per row, inputs with a scale per token.

This is torchao's ``Int8DynamicActivationInt8WeightConfig``, which quantizes inputs in every pass. Integers are
multiplied, so no weight is decoded. On a CPU without VNNI instructions, such products can overflow. The integers then
have 7 bits (torchao's ``reduce_range``), also in the file. The products are int32, and are converted to float32 before
they are scaled. To limit the memory for this, a layer computes its input rows in parts
(`plimsoll.weights.coded_layers`). Not handled: the head and embeddings.
"""

from __future__ import annotations

import torch

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.weights.coded_layers import compute_in_parts
from plimsoll.weights.torchao_layers import Config, plain_layers, quantize_layers, why_not_linear


class DynamicInt8(Shrinker):
    """Quantization of linear layers and their inputs to 8 bits."""

    name = "dynamic_int8"
    saves = (
        "linear weights take a quarter of float32, in the file and in memory; whether inference is faster depends "
        "on the processor and the layer sizes; without Plimsoll, inference also allocates int32 and float32 "
        "products of a layer's whole output, so with many tokens the peak may rise; the model cannot be trained"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why layers cannot be quantized; ``None`` if they can."""
        return why_not_linear(bundle.model, self.name)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Quantize the linear layers of the base model."""
        quantize_layers(bundle.model, [*plain_layers(bundle.model)], _config())
        compute_in_parts(bundle.model)


def _config() -> Config:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    reduced = not torch.cpu._is_vnni_supported()  # even if there is a GPU: models are evaluated on the CPU
    return Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=reduced)
