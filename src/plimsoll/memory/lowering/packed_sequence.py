"""``pack_padded_sequence`` and ``pad_packed_sequence`` while a step is traced, where lengths have no values.

Lengths that come out of the trace are fake: every sample is then taken to be as long as the longest, which is the most
memory that the batch can need, and ``note`` says so. Real lengths (made before the trace) are obeyed.

It does NOT cover lengths read by the model's own code (``lengths.tolist()``), which still stops a trace.

Shapes: T steps, B samples, R rows (the sum of all lengths).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

Note = Callable[[str, int, int], None]


class PackedSequences:
    """Replacements for a ``TorchFunctionMode``, by the function it receives."""

    def __init__(self, note: Note) -> None:
        self._note = note

    @property
    def replacements(self) -> dict[Any, Callable[..., Any]]:
        """``torch.nn.utils.rnn`` calls these two through ``torch._VF``."""
        return {torch._pack_padded_sequence: self.pack, torch._pad_packed_sequence: self.pad}

    def pack(self, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Data [R, ...] and the batch size of each step."""
        steps = input.transpose(0, 1) if batch_first else input
        num_samples = self._lengths(steps, lengths)
        batch_sizes = [sum(length > step for length in num_samples) for step in range(max(num_samples))]
        runs = [(size, batch_sizes.count(size)) for size in sorted(set(batch_sizes), reverse=True)]
        pieces, start = [], 0
        for size, count in runs:
            pieces.append(steps[start : start + count, :size].contiguous().view(size * count, *steps.shape[2:]))
            start += count
        return torch.cat(pieces), known(batch_sizes, steps)

    def pad(
        self, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, *total_length: int
    ) -> tuple[Tensor, Tensor]:
        """The padded batch and its lengths."""
        sizes = values(batch_sizes) or []
        num_steps = max([len(sizes), *total_length])
        output = _Pad.apply(data, sizes, num_steps)  # type: ignore[no-untyped-call]
        lengths = [sum(size > sample for size in sizes) for sample in range(sizes[0])]
        return output.transpose(0, 1) if batch_first else output, known(lengths, data)

    def _lengths(self, steps: Tensor, lengths: Tensor) -> list[int]:
        given = values(lengths)
        if given is not None:
            return given
        self._note(f"{steps.shape[1]} samples are taken to be as long as the longest, {steps.shape[0]} steps", 0, 0)
        return [steps.shape[0]] * steps.shape[1]


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, sizes: Sequence[int], num_steps: int) -> Tensor:
        ctx.shape = data.shape
        return data.new_zeros(num_steps, sizes[0], *data.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_empty(ctx.shape), None, None


def known(numbers: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of which a trace knows the values too: ``nn.LSTM`` reads the first batch size."""
    if not isinstance(like, FakeTensor):
        return torch.tensor(numbers)
    mode = like.fake_mode
    with unset_fake_temporarily():
        real = torch.tensor(numbers)
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def values(tensor: Tensor) -> list[int] | None:
    """The values of a tensor, None if it is fake and has none."""
    real = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if real is None:
        return None
    with unset_fake_temporarily():
        return [int(number) for number in real.tolist()]
