"""Tensors in the host's memory for a training on CUDA: pinned, so that copies run beside the computation.

Where there is no CUDA (a dry run, a test in which the CPU stands in) they are ordinary tensors of the CPU that a
trace counts outside the device. torch rounds the size of a pinned block up to a power of two; that is not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.mapped_memory import StorageSet, dense_strides
from plimsoll.device.off_device import outside_the_device


class PinnedPool:
    """Makes tensors in the host's memory; what they give back goes to torch's own cache of pinned blocks."""

    def __init__(self) -> None:
        self._made = StorageSet()

    def empty_like(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Make a tensor of the shape, strides and type of another; its values are arbitrary.

        ``device`` is the one it is for, by default that of ``tensor``.
        """
        is_pinned = (device or tensor.device).type == "cuda" and not isinstance(tensor, FakeTensor)
        with torch.no_grad(), outside_the_device():
            # No device is said: in a dry run for CUDA that is the host.
            made = torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=tensor.dtype, pin_memory=is_pinned)
        self._made.add(made)
        return made

    def copy_of(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Make a tensor like another, with its values."""
        with torch.no_grad():
            return self.empty_like(tensor, device).copy_(tensor.detach())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor, or what it is a view of, was made here."""
        return tensor in self._made
