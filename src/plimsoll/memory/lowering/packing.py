"""Packed sequences (``torch.nn.utils.rnn``) on fake tensors: torch's own kernels read the lengths from memory.

Same shapes, same allocations as ``aten/src/ATen/native/PackedSequence.cpp`` (torch 2.13): packing copies each run of
steps with equally many samples and joins the copies; padding makes the padded output. Batch sizes and lengths stay on
the host. The lengths must be known (`plimsoll.memory.known`).

Shapes: T steps, B samples, N tokens (the sum of all lengths).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from plimsoll.memory.known import values_of


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, time_first: Tensor, counts: Tensor, batch_sizes: list[int]) -> Tensor:
        ctx.shape = time_first.shape
        ctx.save_for_backward(counts)
        pieces, start = [], 0
        for size, run in groupby(batch_sizes):
            num_steps = len(list(run))
            piece = time_first[start : start + num_steps, :size].contiguous()
            pieces.append(piece.view(-1, *time_first.shape[2:]))
            start += num_steps
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].new_zeros(ctx.shape), None, None


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = data.shape
        return data.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].new_empty(ctx.shape), None


def pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack (T, B, ...) or, ``batch_first``, (B, T, ...) into (N, ...), and count the samples of each step."""
    known = values_of(lengths)
    batch_sizes = [sum(length > step for length in known) for step in range(max(known))]
    time_first = input.transpose(0, 1) if batch_first else input
    counts = torch.tensor(batch_sizes)
    packed: Tensor = _Pack.apply(time_first, counts, batch_sizes)  # type: ignore[no-untyped-call]
    return packed, counts


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Undo `pack_padded_sequence`; returns the padded sequences and their lengths."""
    known = values_of(batch_sizes)
    num_steps = total_length if total_length > 0 else len(known)
    lengths = [sum(size > sample for size in known) for sample in range(known[0])]
    padded: Tensor = _Pad.apply(data, (num_steps, known[0], *data.shape[1:]))  # type: ignore[no-untyped-call]
    return (padded.transpose(0, 1) if batch_first else padded), torch.tensor(lengths)


PACKING: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": pack_padded_sequence,
    "_pad_packed_sequence": pad_packed_sequence,
}
