"""Layers over torchao's int8 weights that need less memory, with bitwise identical results.

- `CodedEmbedding`: torchao decodes the whole table in every pass and then looks up rows. This layer looks up the
  integers and scales of the needed rows, and decodes only these rows. Covers one scale per row and zero points of zero,
  as in ``Int8WeightOnlyConfig``.
- `LinearInParts`: to quantize the input, torchao uses several float32 tensors of the input's size. The product is
  int32, then float32 before scaling. For all tokens at once, these tensors take several times the memory of the layer's
  input and output. This layer computes a part of the tokens at a time. Each temporary tensor is then at most as large
  as the weight in float32, or as `PART_BYTES` if that is more. (With VNNI but without AMX, torch makes an int32 copy of
  the weight anyway.) Covers dynamically quantized inputs with one scale per token
  (``Int8DynamicActivationInt8WeightConfig``).

Both layers use the original weight object, so a model is saved as before. Neither layer can be trained.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.weights.parts import plain_parts, replace_modules


class CodedEmbedding(nn.Embedding):
    """An ``nn.Embedding`` over an int8 weight of torchao.

    Args:
        weight: (V, E), the quantized table, a row of width E for each of V tokens.
        padding_idx: as in the replaced ``nn.Embedding``.
    """

    def __init__(self, weight: nn.Parameter, padding_idx: int | None) -> None:
        rows, width = weight.shape
        super().__init__(rows, width, padding_idx=padding_idx, device="meta")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the decoded rows, (..., E), of the token ids ``input``, (...)."""
        parts = plain_parts(self.weight)
        rows = functional.embedding(input, parts["qdata"]).to(self.weight.dtype)
        # Scales may have a wider type than 16-bit weights: the product is rounded to the weight's type, as in torchao.
        return (rows * functional.embedding(input, parts["scale"])).to(self.weight.dtype)


def decode_rows_only(model: nn.Module) -> None:
    """Replace each plain ``nn.Embedding`` that has an int8 weight by a `CodedEmbedding`."""
    replace_modules(model, _decoding)


def _decoding(module: nn.Module) -> nn.Module | None:
    if type(module) is not nn.Embedding or module.max_norm is not None or not _has_coded_rows(module.weight):
        return None
    assert isinstance(module.weight, nn.Parameter)
    made = CodedEmbedding(module.weight, module.padding_idx)
    return made.train(module.training)


def _has_coded_rows(weight: Any) -> bool:
    parts = plain_parts(weight)
    is_int8 = type(weight).__name__ == "Int8Tensor"  # compared by name, so that torchao need not be imported
    return is_int8 and parts["scale"].shape == (len(weight), 1)


PART_BYTES = 1 << 20
"""The size up to which the tokens of an input are not split: bytes of its inputs or outputs in float32, whichever is
larger."""


class LinearInParts(nn.Linear):
    """An ``nn.Linear`` over a torchao int8 weight, with inputs that are quantized token by token.

    Args:
        layer: the layer to replace; its weight and bias are reused.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """Compute outputs (..., F) from inputs (..., E), for a part of the tokens at a time."""
        shorter, longer = sorted((self.in_features, self.out_features))
        most_rows = max(shorter, PART_BYTES // (torch.float32.itemsize * longer))
        num_parts = math.ceil(input.numel() / self.in_features / most_rows)
        if num_parts <= 1:
            return functional.linear(input, self.weight, self.bias)
        rows_NE = input.reshape(-1, self.in_features)
        output_NF = rows_NE.new_empty((len(rows_NE), self.out_features))
        num_rows = math.ceil(len(rows_NE) / num_parts)  # equal parts: on a GPU, torchao uses floats if rows are few
        for begin in range(0, len(rows_NE), num_rows):
            rows = slice(begin, begin + num_rows)
            output_NF[rows] = functional.linear(rows_NE[rows], self.weight, self.bias)
        return output_NF.view(*input.shape[:-1], self.out_features)


def compute_in_parts(model: nn.Module) -> None:
    """Replace each plain ``nn.Linear`` that quantizes its inputs dynamically by a `LinearInParts`."""
    replace_modules(
        model, lambda one: LinearInParts(one) if type(one) is nn.Linear and _has_coded_inputs(one.weight) else None
    )


def _has_coded_inputs(weight: Any) -> bool:
    # Types are compared by name, so that torchao need not be imported.
    if type(weight).__name__ != "Int8Tensor" or weight.act_quant_kwargs is None:
        return False
    # With one scale for all tokens, parts would change the results. With a static scale, parts are not needed.
    return type(weight.act_quant_kwargs.granularity).__name__ == "PerRow" and weight.act_quant_scale is None
