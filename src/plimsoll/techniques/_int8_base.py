"""Frozen linear layers whose weights are 8-bit integers with a scale for each output channel.

A layer is made dense for its own forward and again for its own backward, and the dense copy is let go at once: autograd
keeps the integers. Gradients flow to the layer's input; the weight has none.

torchao's ``Int8Tensor`` (0.18) is not used: it cannot multiply as GPT-2's ``Conv1D`` does (``aten.addmm``), and its
storage says that it has the bytes of the dense weight, so that what is counted here by storages would be wrong. Plain
tensors are counted, saved and loaded as others are. They are parameters and not buffers, which an undo copies.

Does NOT cover weights that share their memory with others (they stay: nothing would be saved), subclasses of
``nn.Linear``, layers with hooks, and a weight that needs a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plimsoll.mapped import MappedPool

_LARGEST_CODE = 127  # -128 is left out, so that a weight and its negative are as exact
_SMALLEST_SCALE = 1e-12  # of a channel of zeros


class Int8Linear(nn.Module):
    """A frozen ``nn.Linear`` or ``Conv1D`` of transformers.

    Args:
        weight: as the layer has it.
        bias: the layer's own, which is not copied.
        is_transposed: whether the weight is of inputs x outputs, as that of a ``Conv1D``.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, is_transposed: bool) -> None:
        super().__init__()
        codes, scale = quantized(weight.detach(), channel_dim=1 if is_transposed else 0)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias
        self._dtype, self._is_transposed = weight.dtype, is_transposed

    @property
    def weight(self) -> Tensor:
        """The dense weight, for models that ask for it or its type; made anew each time."""
        return dequantized(self.codes, self.scale, self._dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Do what the layer does."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._dtype
        product: Any = _Product.apply  # torch has no types for it
        result: Tensor = product(inputs, self.codes, self.scale, self.bias, dtype, self._is_transposed)
        return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd takes no keywords
        ctx: Any, inputs: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
        is_transposed: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(codes, scale)
        ctx.is_transposed, ctx.dtype = is_transposed, inputs.dtype
        weight = dequantized(codes, scale, dtype)
        return nn.functional.linear(inputs, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        weight = dequantized(codes, scale, gradient.dtype)
        return (gradient @ (weight.t() if ctx.is_transposed else weight)).to(ctx.dtype), *[None] * 5


class KeptOutside:
    """Parameters whose memory is a file's as long as something else stands in for them."""

    def __init__(self) -> None:
        self._pool = MappedPool()
        self._kept: list[tuple[nn.Parameter, torch.device]] = []

    def take(self, parameter: nn.Parameter) -> None:
        """Exchange a parameter's memory for a file's."""
        copy = self._pool.copy_of(parameter)
        self._kept.append((parameter, parameter.device))
        parameter.data = copy

    @torch.no_grad()
    def bring_back(self) -> None:
        """Give them memory again; where there is none, those that are left stay in the file and can be used there."""
        while self._kept:
            parameter, device = self._kept[-1]
            parameter.data = parameter.to(device, copy=True)
            self._kept.pop()


def to_int8(wrappers: Iterable[Any], model: nn.Module, kept: KeptOutside) -> None:
    """Let the layers inside peft's wrappers (``base_layer``) have weights of 8 bits, one after the other."""
    parameters = (parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    num_owners = Counter(parameter.untyped_storage()._cdata for parameter in parameters)
    for wrapper in wrappers:
        layer = wrapper.base_layer
        if _is_plain(layer) and num_owners[layer.weight.untyped_storage()._cdata] == 1:
            wrapper.base_layer = Int8Linear(layer.weight, layer.bias, not isinstance(layer, nn.Linear))
            wrapper.base_layer.train(layer.training)
            kept.take(layer.weight)


@torch.no_grad()
def quantized(weight: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits and the scale of each slice along a dimension, whose largest number is exact."""
    dense = weight.float()
    scale = dense.abs().amax(1 - channel_dim, keepdim=True).div_(_LARGEST_CODE).clamp_(min=_SMALLEST_SCALE)
    return (dense / scale).round_().to(torch.int8), scale


@torch.no_grad()
def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense weight. Multiplied in place: the product of two types makes a copy inside, which nobody counts."""
    return codes.to(torch.float32).mul_(scale).to(dtype)


def _is_plain(layer: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    has_hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    return isinstance(layer, nn.Linear | Conv1D) and type(layer) in {nn.Linear, Conv1D} and not has_hooks
