"""A linear layer that computes with integers of torchao, some rows of its input after the other.

torchao makes the input integers by way of some float32 tensors of its size, and its product is int32, and float32
before it is scaled: several times what a layer reads and gives, for all tokens of a pass at once. Each token has a
scale of its own, so a part of the tokens at a time gives the same numbers, bit for bit, in a part of that memory:
tensors as large as the layer's own weight, or `PART_BYTES`. With fewer tokens the time goes into reading the weight
again and again (x 2 for one of 4 MiB and parts of 1). The module keeps the weight that it was made of, so a model is
saved as before.

Covers weights whose inputs are quantized when they come (``Int8DynamicActivationInt8WeightConfig``), without gradients.
Does NOT learn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.weights.parts import plain_parts

PART_BYTES = 1 << 20
"""Of the larger of what some tokens are in float32 and what is made of them, where the weight has no more."""


class CodedLinear(nn.Linear):
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
        weight_bytes = self.in_features * self.out_features
        row_bytes = torch.float32.itemsize * max(self.in_features, self.out_features)
        num_rows = max(1, max(PART_BYTES, weight_bytes) // row_bytes)
        if input.numel() <= num_rows * self.in_features:
            return functional.linear(input, self.weight, self.bias)
        rows_NE = input.reshape(-1, self.in_features)
        output_NF = rows_NE.new_empty((len(rows_NE), self.out_features))
        for begin in range(0, len(rows_NE), num_rows):
            rows = slice(begin, begin + num_rows)
            output_NF[rows] = functional.linear(rows_NE[rows], self.weight, self.bias)
        return output_NF.view(*input.shape[:-1], self.out_features)


def compute_in_rows(model: nn.Module) -> None:
    """Put a `CodedLinear` in the place of each plain layer whose inputs become integers."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is nn.Linear and _has_coded_inputs(module.weight):
            model.set_submodule(name, CodedLinear(module))


def _has_coded_inputs(weight: Any) -> bool:
    # torchao's; it is not imported for a name. A scale for each row: of one for all, no part is like the whole.
    is_int8 = type(weight).__name__ == "Int8Tensor"
    return is_int8 and weight.act_quant_kwargs is not None and plain_parts(weight)["scale"].shape == (len(weight), 1)
