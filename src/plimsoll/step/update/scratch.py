"""Copies of many tensors with few calls and in reused memory, to undo a part of an update.

The addresses of the tensors are collected once (`Layout`). Tensors of one dtype and device are copied by one call into
memory that is kept between steps (`Scratch`). Which tensors are parameters or states is known only to the callers,
`plimsoll.step.update.commit` and `undo`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import nn

from plimsoll.device.cpu import pages

ADDRESS_OF: dict[type[torch.Tensor], Callable[[torch.Tensor], int]] = {
    torch.Tensor: torch.Tensor.data_ptr,
    nn.Parameter: torch.Tensor.data_ptr,
}
"""Functions that return a tensor's address, for classes that can be copied many at a time. A dry run adds its class."""


class Layout:
    """The memory layout of the tensors of a chunk, collected once: doing it in every step took longer than the copying.

    Attributes:
        alike: one-dimensional views of the tensors of each dtype and device, copied by one call.
        others: tensors that are not contiguous or of a subclass, copied one by one.
        num_elements: the total number of elements of each entry of ``alike``.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        plain = [t for t in tensors if type(t) in ADDRESS_OF and t.is_contiguous()]
        self._plain, self._places = plain, _places(plain)
        are_plain = set(map(id, plain))
        self.others = [tensor for tensor in tensors if id(tensor) not in are_plain]
        self.alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in plain:
            self.alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().view(-1))
        self.num_elements = {key: sum(map(len, flat)) for key, flat in self.alike.items()}

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether these are the same tensors at the same addresses (``.data`` may have been replaced)."""
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return same and _places(self._plain) == self._places


def _places(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(ADDRESS_OF[type(tensor)](tensor), tensor.numel() if tensor.is_contiguous() else -1) for tensor in tensors]


class Scratch:
    """Memory for copies, kept between steps up to ``kept_bytes`` for each dtype and device."""

    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes
        self._kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def copy_of(
        self, key: tuple[torch.dtype, torch.device], flat: list[torch.Tensor], num_elements: int
    ) -> torch.Tensor:
        """Return a copy of all tensors, concatenated.

        Args:
            key: the dtype and device of the tensors.
            flat: one-dimensional views of the tensors.
            num_elements: the total number of elements of the tensors.
        """
        memory = self._kept.get(key)
        if memory is None or len(memory) < num_elements:
            memory = torch.empty(num_elements, dtype=key[0], device=key[1])
            if memory.nbytes <= self.kept_bytes:
                self._kept[key] = memory
            elif type(memory) is torch.Tensor and memory.is_cpu:  # its pages are mapped anew each time
                pages.prefer_large(pages.stretches_of([memory]))
        return torch.cat(flat, out=memory[:num_elements])

    def clear(self) -> None:
        """Free the memory."""
        self._kept.clear()
