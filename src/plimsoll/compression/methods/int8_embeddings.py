"""The token embedding in 8 bits, with a scale per token (the tensor of torchao's ``Int8WeightOnlyConfig``).

Plain transformers with torchao loads the folder, and its results are the same. But torchao decodes the whole embedding
in every pass, which needs the memory of a dense embedding in addition. In a model loaded by Plimsoll, only the rows of
the batch are decoded (`plimsoll.weights.coded_layers`).

Not handled: an embedding that is also the output layer, and position embeddings.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.weights.coded_layers import decode_rows_only
from plimsoll.weights.parts import is_made_of_parts
from plimsoll.weights.torchao_layers import int8_config, num_holders, say_quantized, why_not


class Int8Embeddings(Shrinker):
    """Quantization of the token embedding to 8 bits."""

    name = "int8_embeddings"
    saves = (
        "token embeddings take a little over a quarter of float32, in the file and in memory; without Plimsoll, "
        "each forward pass decodes the whole embedding and the peak rises; the model cannot be trained"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why the embedding cannot be quantized, for example if the output is tied to it; else ``None``."""
        fault = why_not(bundle.model, self.name)
        if fault is not None:
            return fault
        model: Any = bundle.model
        table = model.get_input_embeddings()
        if not isinstance(table, nn.Embedding) or table.max_norm is not None:
            return f"{self.name} needs an nn.Embedding, but found {type(table).__name__}: use another method"
        if is_made_of_parts(table.weight):
            return f"{self.name}: the {len(table.weight)} token embeddings are already quantized: leave it out"
        if num_holders(model, table.weight) > 1:
            return (
                f"{self.name}: the embedding of {len(table.weight)} tokens is shared with another layer, such as the "
                "output, which would need a dense copy, so the model would grow: use vocabulary or low_rank_embeddings"
            )
        return None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Quantize the embedding, and decode only the rows that are looked up."""
        from torchao.quantization import quantize_

        model: Any = bundle.model
        table, before = model.get_input_embeddings(), getattr(model, "hf_quantizer", None)
        config = int8_config()
        quantize_(model, config, filter_fn=lambda module, name: module is table)
        say_quantized(model, config if before is None else before.quantization_config.quant_type)
        decode_rows_only(model)
