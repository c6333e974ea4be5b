"""Layers over integers of torchao that decode or compute no more at once than they need: the same numbers, bit for bit.

- `CodedEmbedding`: torchao decodes the whole table in every pass, and then looks up. Here the integers and the scales
  of the rows are looked up and multiplied, in the memory of the rows. Covers rows with a scale each and zero points
  that are zero, as ``Int8WeightOnlyConfig`` makes them.
- `LinearInParts`: torchao makes the input integers by way of some float32 tensors of its size, and its product is
  int32, and float32 before it is scaled: several times what a layer reads and gives, for all tokens of a pass at once.
  A part of the tokens at a time takes a part of that memory: tensors as large as the layer's weight in float32 (of
  which torch makes an int32 copy for each product, where the processor has VNNI and no AMX), or `PART_BYTES`. Covers
  inputs that are quantized when they come (``Int8DynamicActivationInt8WeightConfig``), a token with a scale of its own.

Both keep the weight that they were made of, so a model is saved as before. Neither learns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.weights.parts import plain_parts, replace_modules


class CodedEmbedding(nn.Embedding):
    """An ``nn.Embedding`` over a weight of torchao with int8 rows.

    Args:
        weight: (V, E), in the place of the table's own.
        padding_idx: of the table that this is put in the place of.
    """

    def __init__(self, weight: nn.Parameter, padding_idx: int | None) -> None:
        rows, width = weight.shape
        super().__init__(rows, width, padding_idx=padding_idx, device="meta")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Decode the rows of some tokens."""
        parts = plain_parts(self.weight)
        rows = functional.embedding(input, parts["qdata"]).to(self.weight.dtype)
        # The scales of 16-bit weights are wider than these: the product is rounded, as torchao rounds it.
        return (rows * functional.embedding(input, parts["scale"])).to(self.weight.dtype)


def decode_rows_only(model: nn.Module) -> None:
    """Put a `CodedEmbedding` in the place of each plain table whose rows are coded."""
    replace_modules(model, _decoding)


def _decoding(module: nn.Module) -> nn.Module | None:
    if type(module) is not nn.Embedding or module.max_norm is not None or not _has_coded_rows(module.weight):
        return None
    assert isinstance(module.weight, nn.Parameter)
    made = CodedEmbedding(module.weight, module.padding_idx)
    return made.train(module.training)


def _has_coded_rows(weight: Any) -> bool:
    parts = plain_parts(weight)
    is_int8 = type(weight).__name__ == "Int8Tensor"  # torchao's; it is not imported for a name
    return is_int8 and parts["scale"].shape == (len(weight), 1)


PART_BYTES = 1 << 20
"""Of the larger of what some tokens are in float32 and what is made of them, where the weight has no more."""


class LinearInParts(nn.Linear):
    """An ``nn.Linear`` over a weight of torchao, whose inputs become integers token by token.

    Args:
        layer: whose weight and bias this has, and in whose place it is put.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """Compute (..., E) -> (..., F), some tokens after the other."""
        shorter, longer = sorted((self.in_features, self.out_features))
        most_rows = max(shorter, PART_BYTES // (torch.float32.itemsize * longer))
        num_parts = math.ceil(input.numel() / self.in_features / most_rows)
        if num_parts <= 1:
            return functional.linear(input, self.weight, self.bias)
        rows_NE = input.reshape(-1, self.in_features)
        output_NF = rows_NE.new_empty((len(rows_NE), self.out_features))
        num_rows = math.ceil(len(rows_NE) / num_parts)  # as many in each: of few torchao makes floats on a GPU
        for begin in range(0, len(rows_NE), num_rows):
            rows = slice(begin, begin + num_rows)
            output_NF[rows] = functional.linear(rows_NE[rows], self.weight, self.bias)
        return output_NF.view(*input.shape[:-1], self.out_features)


def compute_in_parts(model: nn.Module) -> None:
    """Put a `LinearInParts` in the place of each plain layer whose inputs become integers."""
    replace_modules(
        model, lambda one: LinearInParts(one) if type(one) is nn.Linear and _has_coded_inputs(one.weight) else None
    )


def _has_coded_inputs(weight: Any) -> bool:
    # torchao's types, told by their names: torchao is not imported for them.
    if type(weight).__name__ != "Int8Tensor" or weight.act_quant_kwargs is None:
        return False
    # With one scale for all tokens, or one that is known before, a part is not like the whole or needs no parts.
    return type(weight.act_quant_kwargs.granularity).__name__ == "PerRow" and weight.act_quant_scale is None
