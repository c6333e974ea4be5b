"""Training a model for the integers it will be: linear layers compute with their weights rounded, and learn dense ones.

    quantization_aware: int8        # or int4, in a job

Each layer that the method of that name would quantize becomes torchao's ``FakeQuantizedLinear``: in every pass its
weight is rounded to the numbers that the integers stand for (`plimsoll.weights.shrink`: ``int8``, or ``int4`` in groups
of 32), and gradients go to the dense weight as if it had not been. Parameters keep their names, so what is saved is a
plain dense model, whose later ``int8`` or ``int4`` gives the numbers that the training's evaluation saw, but for the
order of rounding.

It does NOT cover the head, embeddings, recurrent models, and inputs that are rounded (``dynamic_int8``).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from plimsoll.errors import JobError
from plimsoll.weights.shrink import Subject
from plimsoll.weights.shrink._structure import as_linear, note, put
from plimsoll.weights.shrink._torchao import nothing_found, plain_layers, why_not
from plimsoll.weights.shrink.int4 import SMALLEST_GROUP, fitting_layers

Kind = Literal["int8", "int4"]


def train_for_integers(model: nn.Module, kind: Kind) -> None:
    """Let the linear layers of a model compute with rounded weights from now on.

    Raises:
        JobError: if torchao is missing, or the model has no layer that the method would quantize.
    """
    fault = why_not(Subject(model), f"quantization_aware: {kind}")
    if fault is not None:
        raise JobError(f"model: {fault}, or leave quantization_aware out")
    names = [*plain_layers(model)] if kind == "int8" else fitting_layers(model, SMALLEST_GROUP)
    if not names:
        raise JobError(f"model: {nothing_found(model, f'quantization_aware: {kind}')}, or leave quantization_aware out")
    for name in names:
        layer: Any = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            layer = as_linear(layer)
            note(model, "as_linear", name)
        put(model, name, _rounding(layer, kind))


def _rounding(layer: nn.Linear, kind: Kind) -> nn.Module:
    """A layer with the parameters of another one; nothing is drawn for it."""
    from torchao.quantization.qat import FakeQuantizedLinear

    sizes = layer.in_features, layer.out_features, layer.bias is not None
    made: nn.Module = FakeQuantizedLinear(*sizes, weight_config=_config(kind), device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def _config(kind: Kind) -> Any:
    """What has the rounding of the method; for four bits that of the file's own form (`plimsoll.weights.int4`)."""
    import torch
    from torchao.quantization import PerAxis
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig, IntxFakeQuantizeConfig

    if kind == "int4":
        return Int4WeightFakeQuantizeConfig(group_size=SMALLEST_GROUP, activation_dtype=torch.bfloat16)
    return IntxFakeQuantizeConfig(torch.int8, granularity=PerAxis(0), is_symmetric=True)
