"""Whether a pass is others of the same samples over again, some of whose kernels may add in any order.

What eager passes repeat to the bit, the pass must repeat to the bit. What they do not (atomics, in backward passes of
embeddings and of attention on a GPU) must lie as near to them as they to each other, within a small multiple: that is
told by some thousand elements of each tensor, spread over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plimsoll.step.cuda_graphs.fingerprints import Print, print_of
from plimsoll.step.undo.saved import is_same_state

_MOST_ELEMENTS = 4096
_SPREAD = 8  # the largest difference of so many numbers is hardly ever that much larger than that of others
_MOST_NOISE = 2e-2  # of a tensor's largest element: rounding in bf16, and more is no rounding


class Seen(NamedTuple):
    """What a pass came to: its loss, gradients, and what it wrote, in prints and some elements; and random numbers."""

    prints: list[Print]
    samples: list[Tensor]
    random_state: Any

    @classmethod
    def of(cls, tensors: Sequence[Tensor], random_state: Any) -> Seen:
        """See them, which waits for the device."""
        return cls([*map(print_of, tensors)], [*map(_sample_of, tensors)], random_state)

    def has_bits_of(self, other: Seen) -> bool:
        """Whether everything is the same to the bit."""
        return self.prints == other.prints and is_same_state(self.random_state, other.random_state)


def are_alike(passes: Sequence[Seen]) -> bool:
    """Whether passes differ by no more than kernels that add in any order."""
    first = passes[0]
    return all(_is_comparable(first, one) for one in passes) and _noise_of(passes) <= _MOST_NOISE


def is_again(passes: Sequence[Seen], another: Seen) -> bool:
    """Whether another pass is these, which are alike, over again."""
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
        if not _largest(first - sample) <= _SPREAD * most:  # nor if it is no number
            return False
    return True


def _is_comparable(one: Seen, other: Seen) -> bool:
    sizes, others = ([each.num_numbers for each in seen.prints] for seen in (one, other))
    return sizes == others and is_same_state(one.random_state, other.random_state)


def _noise_of(passes: Sequence[Seen]) -> float:
    """The largest difference of passes, as a share of the largest element of its tensor."""
    shares = [0.0]
    for first, *others in zip(*(one.samples for one in passes), strict=True):
        scale = _largest(first)
        shares += [_largest(first - one) / scale for one in others if scale]
    return max(shares)


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _sample_of(tensor: Tensor) -> Tensor:
    """Up to so many elements, evenly spread over the storage of a dense tensor, as numbers of the host."""
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = numbers.view(-1) if numbers.is_contiguous() else numbers.reshape(-1)
    return flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].to("cpu", torch.float64)
