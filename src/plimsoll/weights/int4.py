"""Weights of 4 bits: as torchao's kernel on the CPU wants them, and as a file keeps them.

The kernel packs integers as the processor it runs on likes them (``Int4OpaqueTensor``; AVX2 and AVX-512 differ), so
such bytes mean nothing elsewhere, and torchao writes none. In a file they are torchao's ``Int4Tensor``: two integers in
a byte, in order, with the same scales and zero points. Both stand for ``integer * scale + zero_point``, integers from
-8 to 7, and no bit is lost between the two.

Does NOT compute with the form of files, for which torchao has kernels on GPUs only (those of ``mslk``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OPAQUE = "Int4OpaqueTensor"
PLAIN = "Int4Tensor"

_ROWS = 256  # that are unpacked at once
_BLOCK_ROWS = 64  # that torch's kernel packs together; of AVX2 32
_BLOCK_NUMBERS = 1 << 18  # that are packed at once, more or less: 1 MiB of four bytes each
_MIDDLE = 8
_NIBBLE = 0xF

INT4_ROWS = 16
"""torch's kernel packs so many rows at once: a layer has a multiple of it."""


def plain_of(packed: Any) -> Tensor:
    """Return the form of files of a weight that is packed for the CPU: scales and zero points as they are."""
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
    """Return a weight of a file as the CPU computes with it."""
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
    """Return a dense weight in 4 bits, as torchao makes them for the CPU; on the meta device its sizes.

    Args:
        weight: (rows, width), rows a multiple of `INT4_ROWS`.
        group: how many numbers of a row have a scale: 32, 64 or 128, of which the width is a multiple.
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
    """The integers, from -8 to 7, (rows, width); the kernel itself decodes what it has packed."""
    rows, width = packed.shape
    group = packed.block_size[-1]
    exact = packed.scale_and_zero.float()  # in 16 bits a decoded number may be nearer to the next integer
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
    """Pack what has two integers in a byte, some rows after the other: torch wants each integer in four bytes."""
    made = torch.empty_like(pairs)
    step = max(_BLOCK_ROWS, _BLOCK_NUMBERS // (2 * pairs.shape[1]) // _BLOCK_ROWS * _BLOCK_ROWS)
    for few, into in zip(torch.split(pairs, step), torch.split(made, step), strict=True):
        codes = torch.stack((few & _NIBBLE, few >> 4), dim=-1).flatten(1).to(torch.int32)
        into.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.add_(_MIDDLE).bitwise_and_(_NIBBLE), 1))
    return made


def _pairs(codes: Tensor) -> Tensor:
    """Two integers of a row in a byte, the first in the lower half."""
    low, high = codes[:, ::2].view(torch.uint8) & _NIBBLE, codes[:, 1::2].view(torch.uint8) & _NIBBLE
    return (low | (high << 4)).view(torch.int8)
