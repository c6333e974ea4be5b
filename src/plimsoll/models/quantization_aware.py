"""Quantization-aware training: linear layers compute with rounded weights and train dense ones.

    quantization_aware: int8        # or int4, in a job

Each layer that the compression method ``int8`` or ``int4`` would quantize becomes torchao's ``FakeQuantizedLinear``, or
its counterpart for a transformers Conv1D. Every pass rounds the weight to the values that the integers represent, and
gradients go straight through to the dense weight. `plimsoll.compression.methods` defines the methods; ``int4`` has a
scale for each group of 32 weights.

Parameters keep their names and shapes, so the saved model is a plain dense model, which its usual class loads.
Quantizing it later with ``int8`` or ``int4(compute=fp32)`` gives the outputs seen in evaluation during training, except
for the order of sums.

Not handled: the head, embeddings, recurrent models, and rounded inputs (``dynamic_int8``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.errors import JobError
from plimsoll.weights.structure import put, sizes_of
from plimsoll.weights.torchao_layers import SMALLEST_INT4_GROUP, int4_layers, nothing_found, plain_layers, why_not

Kind = Literal["int8", "int4"]


def train_for_integers(model: nn.Module, kind: Kind) -> None:
    """Replace the linear layers of a model by layers that compute with rounded weights.

    Raises:
        JobError: if torchao is missing, or the method would quantize no layer of the model.
    """
    fault = why_not(model, f"quantization_aware: {kind}")
    if fault is not None:
        raise JobError(f"model: {fault}, or leave quantization_aware out")
    names = [*plain_layers(model)] if kind == "int8" else int4_layers(model, SMALLEST_INT4_GROUP)
    if not names:
        raise JobError(f"model: {nothing_found(model, f'quantization_aware: {kind}')}, or leave quantization_aware out")
    for name in names:
        put(model, name, _rounding(model.get_submodule(name), kind))


def _rounding(layer: Any, kind: Kind) -> nn.Module:
    """Return a layer with rounded weights that has the parameters of another layer. No new weights are drawn."""
    from torchao.quantization.qat import FakeQuantizedLinear

    num_in, num_out = sizes_of(layer)
    if isinstance(layer, nn.Linear):
        sizes = num_in, num_out, layer.bias is not None
        made: nn.Module = FakeQuantizedLinear(*sizes, weight_config=_config(kind), device="meta")
    else:
        with torch.device("meta"):
            made = _rounded_conv1d()(num_out, num_in, _config(kind))
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


@cache
def _rounded_conv1d() -> type[nn.Module]:
    """Return the rounding class for GPT-2's Conv1D layers. The parameter keeps its shape (inputs, outputs)."""
    from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase
    from transformers.pytorch_utils import Conv1D

    class RoundedConv1D(Conv1D):
        """A Conv1D whose weight is rounded like the weight of a linear layer."""

        def __init__(self, nf: int, nx: int, config: Any) -> None:
            super().__init__(nf, nx)  # type: ignore[no-untyped-call]
            self.weight_fake_quantizer = FakeQuantizerBase.from_config(config)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight_fake_quantizer(self.weight.t()), self.bias)

    return RoundedConv1D


def _config(kind: Kind) -> Any:
    """Return torchao's rounding configuration of a method. ``int4`` matches saved files (`plimsoll.weights.int4`)."""
    from torchao.quantization import PerAxis
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig, IntxFakeQuantizeConfig

    if kind == "int4":
        return Int4WeightFakeQuantizeConfig(group_size=SMALLEST_INT4_GROUP, activation_dtype=torch.bfloat16)
    return IntxFakeQuantizeConfig(torch.int8, granularity=PerAxis(0), is_symmetric=True)
