"""Frozen linear layers whose weights are codes of 8 or 4 bits (see `mechanisms.codes`).

A layer is made dense for its own forward and again for its own backward, and the dense copy is let go at once: autograd
keeps the codes. Gradients flow to the layer's input; the weight has none. Codes and scales are parameters and not
buffers, which an undo copies.

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

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.techniques.mechanisms.codes import CODECS, Codec


class CodedLinear(nn.Module):
    """A frozen ``nn.Linear`` or ``Conv1D`` of transformers.

    Args:
        weight: as the layer has it.
        bias: the layer's own, which is not copied.
        is_transposed: whether the weight is of inputs x outputs, as that of a ``Conv1D``.
        codec: makes the codes.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, is_transposed: bool, codec: Codec) -> None:
        super().__init__()
        dense = weight.detach()
        codes, scale = codec.encode(dense.t() if is_transposed else dense)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias
        self._dtype, self._is_transposed, self._codec = weight.dtype, is_transposed, codec

    @property
    def weight(self) -> Tensor:
        """The dense weight, for models that ask for it or its type; made anew each time."""
        weight = self._codec.decode(self.codes, self.scale, self._dtype)
        return weight.t() if self._is_transposed else weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Do what the layer does."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._dtype
        product: Any = _Product.apply  # torch has no types for it
        result: Tensor = product(inputs, self.codes, self.scale, self.bias, dtype, self._codec)
        return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd takes no keywords
        ctx: Any, inputs: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, codec: Codec
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.codec, ctx.dtype = codec, inputs.dtype
        return nn.functional.linear(inputs, codec.decode(codes, scale, dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        weight = ctx.codec.decode(codes, scale, gradient.dtype)
        return (gradient @ weight).to(ctx.dtype), *[None] * 5


class KeptOutside:
    """Parameters whose memory is a file's as long as something else stands in for them.

    Args:
        files: what the model was built in, if not in memory: what is there stays there, before and after.
    """

    def __init__(self, files: MappedPool | None = None) -> None:
        self._pool = files or MappedPool()
        self._kept: list[tuple[nn.Parameter, torch.device]] = []

    def take(self, parameter: nn.Parameter) -> None:
        """Exchange a parameter's memory for a file's."""
        if self._pool.holds(parameter):
            return
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


def to_codes(wrappers: Iterable[Any], model: nn.Module, kept: KeptOutside, base: str) -> None:
    """Let the layers inside peft's wrappers (``base_layer``) have weights in codes, one after the other.

    Args:
        wrappers: peft's.
        model: that they are of.
        kept: where the weights go.
        base: which of `CODECS`.
    """
    parameters = (parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    num_owners = Counter(parameter.untyped_storage()._cdata for parameter in parameters)
    codec = CODECS[base]
    for wrapper in wrappers:
        layer = wrapper.base_layer
        if not _is_plain(layer) or num_owners[layer.weight.untyped_storage()._cdata] > 1:
            continue
        is_transposed = not isinstance(layer, nn.Linear)
        if codec.can_encode(layer.weight.t() if is_transposed else layer.weight):
            wrapper.base_layer = CodedLinear(layer.weight, layer.bias, is_transposed, codec)
            wrapper.base_layer.train(layer.training)
            kept.take(layer.weight)


def _is_plain(layer: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    has_hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    return isinstance(layer, nn.Linear | Conv1D) and type(layer) in {nn.Linear, Conv1D} and not has_hooks
