"""Training a model for the integers it will be: linear layers compute with their weights rounded, and learn dense ones.

    quantization_aware: int8        # or int4, in a job

Each layer that the method of that name would quantize becomes torchao's ``FakeQuantizedLinear``, or the like of it for
a Conv1D of transformers: in every pass its weight is rounded to the numbers that the integers stand for
(`plimsoll.compression.methods`: ``int8``, or ``int4`` in groups of 32), and gradients go to the dense weight as if it
had not been. Parameters keep their names and shapes, so what is saved is a plain dense model, which its own class
loads. Its later ``int8`` or ``int4(compute=fp32)`` gives the numbers that the training's evaluation saw, but for the
order of sums.

It does NOT cover the head, embeddings, recurrent models, and inputs that are rounded (``dynamic_int8``).
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
    """Let the linear layers of a model compute with rounded weights from now on.

    Raises:
        JobError: if torchao is missing, or the model has no layer that the method would quantize.
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
    """A layer with the parameters of another one; nothing is drawn for it."""
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
    """Make the class for GPT-2's layers, whose weight is (in, out): it stays so, for the file and the optimizer."""
    from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase
    from transformers.pytorch_utils import Conv1D

    class RoundedConv1D(Conv1D):
        """A Conv1D whose weight is rounded as that of the linear layer it will be."""

        def __init__(self, nf: int, nx: int, config: Any) -> None:
            super().__init__(nf, nx)  # type: ignore[no-untyped-call]
            self.weight_fake_quantizer = FakeQuantizerBase.from_config(config)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight_fake_quantizer(self.weight.t()), self.bias)

    return RoundedConv1D


def _config(kind: Kind) -> Any:
    """What has the rounding of the method; for four bits that of the file's own form (`plimsoll.weights.int4`)."""
    from torchao.quantization import PerAxis
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig, IntxFakeQuantizeConfig

    if kind == "int4":
        return Int4WeightFakeQuantizeConfig(group_size=SMALLEST_INT4_GROUP, activation_dtype=torch.bfloat16)
    return IntxFakeQuantizeConfig(torch.int8, granularity=PerAxis(0), is_symmetric=True)
