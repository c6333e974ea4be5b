"""Tensors in host memory for training on CUDA, pinned so that copies run parallel to computation.

In a dry run, or a test that uses the CPU, they are ordinary CPU tensors, which a trace does not count as device memory.
Torch rounds the size of a pinned block up to a power of two; the difference is not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.mapped_memory import StorageSet, dense_strides
from plimsoll.device.off_device import outside_the_device


class PinnedPool:
    """A source of tensors in host memory. Torch keeps freed blocks in its cache of pinned blocks."""

    def __init__(self) -> None:
        self._made = StorageSet()

    def empty_like(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Create an uninitialized tensor with the shape, strides and dtype of another.

        Args:
            tensor: the tensor to imitate.
            device: the device that will copy to or from the new tensor; by default the device of ``tensor``.
        """
        is_pinned = (device or tensor.device).type == "cuda" and not isinstance(tensor, FakeTensor)
        with torch.no_grad(), outside_the_device():
            # No device argument: in a dry run for CUDA the default is the host.
            made = torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=tensor.dtype, pin_memory=is_pinned)
        self._made.add(made)
        return made

    def copy_of(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Create a copy of a tensor in host memory; ``device`` as in `empty_like`."""
        with torch.no_grad():
            return self.empty_like(tensor, device).copy_(tensor.detach())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this pool created the storage of a tensor."""
        return tensor in self._made
