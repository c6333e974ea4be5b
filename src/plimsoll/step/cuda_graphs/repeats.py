"""Comparing a pass with other passes of the same samples, although some kernels may add in any order.

Tensors that are bitwise identical in all eager passes must be bitwise identical in the compared pass. Other tensors may
vary because of atomics, for example in the backward pass of embeddings and attention on a GPU. Their difference to the
eager passes may be a small multiple of the difference between these passes. A few thousand evenly spread elements of
each tensor are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plimsoll.step.cuda_graphs.fingerprints import Print, print_of
from plimsoll.step.undo.saved import is_same_state

_MOST_ELEMENTS = 4096
_SPREAD = 8  # the largest differences of pairs of passes hardly ever vary by more than this factor
_MOST_NOISE = 2e-2  # relative to a tensor's largest element: the rounding of bf16


class Seen(NamedTuple):
    """The results of a pass: fingerprints and sampled elements of loss, gradients and written tensors; random state."""

    prints: list[Print]
    samples: list[Tensor]
    random_state: Any

    @classmethod
    def of(cls, tensors: Sequence[Tensor], random_state: Any) -> Seen:
        """Record the results; this waits for the device."""
        return cls([*map(print_of, tensors)], [*map(_sample_of, tensors)], random_state)

    def has_bits_of(self, other: Seen) -> bool:
        """Return whether all results of two passes are bitwise identical."""
        return self.prints == other.prints and is_same_state(self.random_state, other.random_state)


def are_alike(passes: Sequence[Seen]) -> bool:
    """Return whether passes differ so little that only the order of additions in kernels may be the cause."""
    first = passes[0]
    return all(_is_comparable(first, one) for one in passes) and _noise_of(passes) <= _MOST_NOISE


def is_again(passes: Sequence[Seen], another: Seen) -> bool:
    """Return whether a pass gives the same results as earlier passes.

    Args:
        passes: earlier passes of the same samples, which are alike (see `are_alike`).
        another: the pass to compare.
    """
    if not _is_comparable(passes[0], another):
        return False
    noise = _noise_of(passes)
    for number, sample in enumerate(another.samples):
        prints = {one.prints[number] for one in passes}
        if len(prints) == 1:
            if another.prints[number] not in prints:
                return False
            continue
        first, *others = (one.samples[number] for one in passes)
        most = max(noise * _largest(first), *(_largest(first - one) for one in others))
        if not _largest(first - sample) <= _SPREAD * most:  # true for NaN, too
            return False
    return True


def _is_comparable(one: Seen, other: Seen) -> bool:
    sizes, others = ([each.num_numbers for each in seen.prints] for seen in (one, other))
    return sizes == others and is_same_state(one.random_state, other.random_state)


def _noise_of(passes: Sequence[Seen]) -> float:
    """Return the largest difference between passes, relative to the largest element of the tensor."""
    shares = [0.0]
    for first, *others in zip(*(one.samples for one in passes), strict=True):
        scale = _largest(first)
        shares += [_largest(first - one) / scale for one in others if scale]
    return max(shares)


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _sample_of(tensor: Tensor) -> Tensor:
    """Return about `_MOST_ELEMENTS` elements of a dense tensor, evenly spread over it, as float64 in host memory."""
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = numbers.view(-1) if numbers.is_contiguous() else numbers.reshape(-1)
    return flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].to("cpu", torch.float64)
