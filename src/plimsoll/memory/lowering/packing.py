"""Packed sequences (``torch.nn.utils.rnn``) on fake tensors: torch's kernels read the lengths from memory.

Shapes and allocations are as in ``aten/src/ATen/native/PackedSequence.cpp`` (torch 2.13). Packing copies each group of
consecutive steps with the same number of samples, and concatenates the copies. Padding allocates the padded output.
Batch sizes and lengths stay on the host. The lengths must be known (`plimsoll.memory.known_values`).

Errors are raised in the same cases as in torch, and name the sample. A batch needs at least one sample and one step,
and a length for each sample. Lengths must be above 0 and in decreasing order (``enforce_sorted=True``). Without
``enforce_sorted``, torch has sorted them already. Lengths beyond the last step are an error here,
although torch packs such a batch into fewer tokens than it counts: no net can read the result.

Shapes: T steps, B samples, N tokens (the sum of all lengths).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from plimsoll.errors import InputError
from plimsoll.memory.known_values import values_of

_MOST_SHOWN = 8


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, time_first: Tensor, counts: Tensor, batch_sizes: list[int]) -> Tensor:
        ctx.shape = time_first.shape
        ctx.save_for_backward(counts)
        runs, start = [], 0
        for size, run in groupby(batch_sizes):
            num_steps = len(list(run))
            samples = time_first[start : start + num_steps, :size].contiguous()
            runs.append(samples.view(-1, *time_first.shape[2:]))
            start += num_steps
        return torch.cat(runs)

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
    time_first = input.transpose(0, 1) if batch_first else input
    _require_packable(time_first, known)
    batch_sizes = [sum(length > step for length in known) for step in range(max(known))]
    counts = torch.tensor(batch_sizes)
    packed: Tensor = _Pack.apply(time_first, counts, batch_sizes)  # type: ignore[no-untyped-call]
    return packed, counts


def _require_packable(time_first: Tensor, lengths: list[int]) -> None:
    """Raise an error for lengths that ``_pack_padded_sequence`` does not accept."""
    num_steps, num_samples = time_first.shape[:2]
    if not time_first.numel():
        raise InputError(
            f"cannot pack a batch of shape {list(time_first.shape)} (steps first): it has no values: leave out empty "
            "batches"
        )
    if len(lengths) != num_samples:
        raise InputError(
            f"cannot pack {num_samples} samples with {len(lengths)} lengths {_shown(lengths)}: give one length for each"
        )
    for sample, (length, next_length) in enumerate(zip(lengths, [*lengths[1:], 0], strict=True)):
        if next_length > length:
            raise InputError(
                f"cannot pack sample {sample + 1} (counted from 0) with {next_length} steps after one with {length} "
                "because `enforce_sorted` is True: pass enforce_sorted=False, or sort the samples by decreasing length"
            )
        if length < 1:
            raise InputError(
                f"cannot pack sample {sample} (counted from 0, longest first) of {num_samples}: its length is "
                f"{length}: leave out samples without tokens, or give them one padding token (lengths.clamp(min=1))"
            )
    if lengths[0] > num_steps:
        raise InputError(
            f"cannot pack a sample of {lengths[0]} steps, the longest of {num_samples}, in a batch of {num_steps} "
            "steps: torch packs it, but its recurrent layers then fail: give lengths of at most the number of steps"
        )


def _shown(lengths: list[int]) -> str:
    return f"{lengths[:_MOST_SHOWN]}" if len(lengths) <= _MOST_SHOWN else f"{lengths[:_MOST_SHOWN]} ..."


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Undo `pack_padded_sequence`, and return the padded sequences and their lengths."""
    known = values_of(batch_sizes)
    num_steps = total_length if total_length > 0 else len(known)
    lengths = [sum(size > sample for size in known) for sample in range(known[0])]
    padded: Tensor = _Pad.apply(data, (num_steps, known[0], *data.shape[1:]))  # type: ignore[no-untyped-call]
    return (padded.transpose(0, 1) if batch_first else padded), torch.tensor(lengths)


PACKING: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": pack_padded_sequence,
    "_pad_packed_sequence": pad_packed_sequence,
}
