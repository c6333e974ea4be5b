"""Conversion of 4-bit weights between the layout of torchao's CPU kernel and the layout in files.

The kernel packs integers for the processor on which it runs (``Int4OpaqueTensor``; AVX2 and AVX-512 differ). The packed
bytes have no meaning on other machines, and torchao does not save them. Files contain torchao's ``Int4Tensor``: two
integers per byte, in order, with the same scales and zero points. Both layouts represent ``integer * scale +
zero_point``, with integers from -8 to 7. The conversion is lossless.

Does NOT compute with the layout in files: torchao has kernels for it on GPUs only (from ``mslk``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OPAQUE = "Int4OpaqueTensor"
PLAIN = "Int4Tensor"

_ROWS = 256  # rows unpacked at once
_BLOCK_ROWS = 64  # rows that torch's kernel packs together; 32 with AVX2
_BLOCK_NUMBERS = 1 << 18  # about as many integers are packed at once: 1 MiB at four bytes each
_MIDDLE = 8
_NIBBLE = 0xF

INT4_ROWS = 16
"""torch's kernel packs rows in blocks of this size; a layer must have a multiple of it."""


def plain_of(packed: Any) -> Tensor:
    """Convert a weight packed for the CPU to the layout of files (``Int4Tensor``). Scales and zero points are kept."""
    from torchao.quantization import Int4Tensor

    scales, zeros = packed.scale_and_zero[..., 0].contiguous(), packed.scale_and_zero[..., 1].contiguous()
    if packed.qdata.is_meta:
        rows, width = packed.shape
        codes = torch.empty((rows, width // 2), dtype=torch.int8, device="meta")
    else:
        codes = _pairs(_codes(packed, scales, zeros))
    made: Tensor = Int4Tensor(codes, scales, zeros, list(packed.block_size), list(packed.shape))
    return made


def packed_of(plain: Any) -> Tensor:
    """Convert a weight in the layout of files (``Int4Tensor``) to the layout of the CPU (``Int4OpaqueTensor``)."""
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    rows, width = plain.shape
    if plain.qdata.is_meta:
        qdata = torch.empty((rows, width // 2), dtype=torch.uint8, device="meta")
    else:
        qdata = _packed(plain.qdata.view(torch.uint8))
    made: Tensor = Int4OpaqueTensor(
        qdata, torch.stack((plain.scale, plain.zero_point), dim=-1), list(plain.block_size), torch.Size((rows, width))
    )
    return made


def packed_int4(weight: Tensor, group: int) -> Tensor:
    """Quantize a dense weight to 4 bits, packed for the CPU. On the meta device, only shapes are created.

    Args:
        weight: (rows, width), with rows a multiple of `INT4_ROWS`.
        group: number of neighbouring weights in a row that share a scale: 32, 64 or 128. The width is a multiple of it.
    """
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    if not weight.is_meta:
        made: Tensor = Int4OpaqueTensor.from_hp(weight, [1, group])
        return made
    rows, width = weight.shape
    scales = torch.empty((width // group, rows, 2), dtype=weight.dtype, device="meta")
    qdata = torch.empty((rows, width // 2), dtype=torch.uint8, device="meta")
    sized: Tensor = Int4OpaqueTensor(qdata, scales, [1, group], weight.shape)
    return sized


def _codes(packed: Any, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the integers from -8 to 7, (rows, width), which the kernel decodes from its packed layout."""
    rows, width = packed.shape
    group = packed.block_size[-1]
    exact = packed.scale_and_zero.float()  # in 16 bits, a decoded number could round to the next integer
    codes = torch.empty((rows, width), dtype=torch.int8)
    for begin in range(0, width, _ROWS):
        one_hot = torch.zeros((min(_ROWS, width - begin), width), dtype=torch.float32)
        one_hot[torch.arange(len(one_hot)), torch.arange(begin, begin + len(one_hot))] = 1
        dense = torch.ops.aten._weight_int4pack_mm_for_cpu(one_hot, packed.qdata, group, exact)
        of_group = torch.arange(begin, begin + len(one_hot)) // group
        found = ((dense.double() - zeros[of_group].double()) / scales[of_group].double()).round()
        codes[:, begin : begin + len(one_hot)] = found.t().to(torch.int8)
    return codes


def _packed(pairs: Tensor) -> Tensor:
    """Pack integers (two per byte) for the CPU kernel, block by block, because torch needs four bytes per integer."""
    made = torch.empty_like(pairs)
    step = max(_BLOCK_ROWS, _BLOCK_NUMBERS // (2 * pairs.shape[1]) // _BLOCK_ROWS * _BLOCK_ROWS)
    for few, into in zip(torch.split(pairs, step), torch.split(made, step), strict=True):
        codes = torch.stack((few & _NIBBLE, few >> 4), dim=-1).flatten(1).to(torch.int32)
        into.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.add_(_MIDDLE).bitwise_and_(_NIBBLE), 1))
    return made


def _pairs(codes: Tensor) -> Tensor:
    """Pack two neighbouring integers of a row into each byte, the first into the lower four bits."""
    low, high = codes[:, ::2].view(torch.uint8) & _NIBBLE, codes[:, 1::2].view(torch.uint8) & _NIBBLE
    return (low | (high << 4)).view(torch.int8)
