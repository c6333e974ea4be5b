"""Quantization of frozen weights to 8-bit or 4-bit codes, and dequantization.

Codes and scales are plain tensors, which are counted, saved, loaded and dry-run like other tensors. The tensor
subclasses of torchao (0.18) are not used. Their storage reports the bytes of the dense weight, so memory counted by
storages would be wrong. They also lack ``aten.addmm``, which GPT-2's ``Conv1D`` calls.

``int8``: integers from -127 to 127 with one scale per output channel; the largest weight is exact. ``nf4``: the 16
values of NormalFloat, each of which covers an equal share of a normal distribution. It has one scale per group of up to
64 weights of an output channel, and two codes per byte (Dettmers et al. 2023, arXiv:2305.14314, appendix E).

A weight that is not finite makes all weights with the same scale non-finite. Not handled: quantized scales and, for 4
bits, weights whose number of inputs is not a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST_CODE = 127  # not -128, so that a weight and its negative are equally exact
_SMALLEST_SCALE = 1e-12  # for a channel or group of zeros
_LARGEST_GROUP = 64  # weights per scale, as in the paper
_SMALLEST_GROUP = 16  # in smaller groups, the 32-bit scales would add more than 2 bits per weight

# The same values as in bitsandbytes and the paper: quantiles of a normal distribution, and 0, scaled to a maximum of 1.
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Codec(NamedTuple):
    """Functions to quantize a weight (outputs, inputs) to codes and scales, and to dequantize it."""

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    can_encode: Callable[[Tensor], bool]


@torch.no_grad()
def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    dense = weight.float()
    scale = dense.abs().amax(1, keepdim=True).div_(_LARGEST_CODE).clamp_(min=_SMALLEST_SCALE)
    return (dense / scale).round_().to(torch.int8).contiguous(), scale  # a Conv1D's weight arrives transposed


@torch.no_grad()
def _from_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dense weight. The product is in place, because a product of mixed dtypes makes an uncounted copy."""
    return codes.to(torch.float32).mul_(scale).to(dtype)


@torch.no_grad()
def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    num_outputs, num_inputs = weight.shape
    groups = weight.float().contiguous().view(num_outputs, -1, _group_of(num_inputs))
    scale = groups.abs().amax(2, keepdim=True).clamp_(min=_SMALLEST_SCALE)
    values = torch.tensor(NF4_VALUES, device=weight.device)
    codes = torch.bucketize(groups / scale, (values[1:] + values[:-1]) / 2, out_int32=True).view(num_outputs, -1)
    packed = codes[:, ::2].mul(16).add_(codes[:, 1::2]).to(torch.uint8)
    return packed, scale.squeeze(2)


@torch.no_grad()
def _from_nf4(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dense weight. Each byte of the codes is the index of the pair of values that it encodes."""
    num_outputs, num_groups = scale.shape
    values = torch.tensor(NF4_VALUES, device=codes.device)
    pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1)
    dense = torch.nn.functional.embedding(codes.to(torch.int32), pairs).view(num_outputs, num_groups, -1)
    return dense.mul_(scale.unsqueeze(2)).view(num_outputs, -1).to(dtype)


def _group_of(num_inputs: int) -> int:
    """Return the largest power of two, up to `_LARGEST_GROUP`, that divides the number of inputs."""
    return min(num_inputs & -num_inputs, _LARGEST_GROUP)


def _has_large_groups(weight: Tensor) -> bool:
    return weight.numel() > 0 and _group_of(weight.size(1)) >= _SMALLEST_GROUP


CODECS = {
    "int8": Codec(_to_int8, _from_int8, lambda weight: True),
    "nf4": Codec(_to_nf4, _from_nf4, _has_large_groups),
}
