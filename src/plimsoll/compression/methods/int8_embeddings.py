"""The table of token embeddings in 8 bits, a scale for each token (the tensor of torchao's ``Int8WeightOnlyConfig``).

Plain transformers with torchao reads the folder and gives the same numbers, but torchao decodes the whole table in
every pass: its memory then rises by the dense table. Loaded by Plimsoll only the rows of the batch are decoded
(`plimsoll.weights.coded_layers`). Does NOT cover a table that is the output layer too, and tables of positions.
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
    """See the module."""

    name = "int8_embeddings"
    saves = (
        "the file and the memory of the token embeddings fall to a little over a quarter of float32; loaded without "
        "Plimsoll the table is decoded whole in every pass, and the peak of memory rises; it cannot be trained"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Refuse tables that are shared with the output, are none of torch, or are quantized."""
        fault = why_not(bundle.model, self.name)
        if fault is not None:
            return fault
        model: Any = bundle.model
        table = model.get_input_embeddings()
        if not isinstance(table, nn.Embedding) or table.max_norm is not None:
            return f"{self.name} looked for an nn.Embedding and found a {type(table).__name__}: use another method"
        if is_made_of_parts(table.weight):
            return f"{self.name}: the {len(table.weight)} token embeddings are quantized already: leave it out"
        if num_holders(model, table.weight) > 1:
            return (
                f"{self.name}: the table of {len(table.weight)} tokens is shared with another layer, such as the "
                "output, which would need a dense copy of its own: more bytes, not fewer; use vocabulary or low_rank_"
                "embeddings"
            )
        return None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Quantize the table, and decode only what is looked up."""
        from torchao.quantization import quantize_

        model: Any = bundle.model
        table, before = model.get_input_embeddings(), getattr(model, "hf_quantizer", None)
        config = int8_config()
        quantize_(model, config, filter_fn=lambda module, name: module is table)
        say_quantized(model, config if before is None else before.quantization_config.quant_type)
        decode_rows_only(model)
