"""Frozen linear layers with 8-bit or 4-bit weights (see `mechanisms.codes`).

A layer's weight is dequantized for its forward and again for its backward, and the dense copy is freed at once. Only
the codes and scales are saved for backward. Gradients flow to the layer's input; the weight has none. Codes and scales
are parameters rather than buffers, because the undo of a step copies all buffers.

Not handled: subclasses of ``nn.Linear``, layers with hooks, weights that need a gradient, and weights that share memory
with other weights. Shared weights stay dense, because quantizing them would free no memory.
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
    """A frozen ``nn.Linear``, or a ``Conv1D`` of transformers, with a quantized weight.

    Args:
        weight: the layer's weight.
        bias: the layer's bias, which is not copied.
        is_transposed: whether the weight is (inputs, outputs), as in ``Conv1D``.
        codec: the functions that quantize and dequantize the weight.
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
        """The dense weight, for models that read it or its dtype. It is dequantized at each access."""
        weight = self._codec.decode(self.codes, self.scale, self._dtype)
        return weight.t() if self._is_transposed else weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer's outputs."""
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
    """Parameters whose values are kept in a file while other parameters replace them.

    Args:
        files: the files in which the model was built, if any; parameters in these files are not moved.
    """

    def __init__(self, files: MappedPool | None = None) -> None:
        self._pool = files or MappedPool()
        self._kept: list[tuple[nn.Parameter, torch.device]] = []

    def take(self, parameter: nn.Parameter) -> None:
        """Move a parameter's memory to a file."""
        if self._pool.holds(parameter):
            return
        copy = self._pool.copy_of(parameter)
        self._kept.append((parameter, parameter.device))
        parameter.data = copy

    @torch.no_grad()
    def bring_back(self) -> None:
        """Move the parameters back. If memory runs out, the remaining ones stay in the file and can be used there."""
        while self._kept:
            parameter, device = self._kept[-1]
            parameter.data = parameter.to(device, copy=True)
            self._kept.pop()


def to_codes(wrappers: Iterable[Any], model: nn.Module, kept: KeptOutside, base: str) -> None:
    """Quantize the layers inside peft's wrappers (``base_layer``), one after another.

    Args:
        wrappers: peft's wrappers of linear layers.
        model: the model that contains them.
        kept: receives the original weights.
        base: the name of the codec in `CODECS`.
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
