"""What a step can change before the optimizer runs, besides the gradients, remembered so that it can be put back.

Covers the random number generators of the host and the device (and of cuDNN's dropout), and the buffers of the model
(BatchNorm's running statistics, spectral norm's vectors, any registered buffer). On the fast path a buffer of integers
or truth values (masks, positions) is copied only if its version counter moved since it was last copied.

Does NOT cover Python attributes that a module changes in ``forward`` (a cached hidden state, a counter): register a
buffer instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from plimsoll.device import cudnn_dropout, onednn
from plimsoll.device.base import Backend
from plimsoll.run.boundary import fitting


@dataclass(slots=True)
class _Saved:
    """A buffer as it was: the tensor that was registered (or none), its value, and its version counter then."""

    module: nn.Module
    name: str
    tensor: torch.Tensor | None
    copy: torch.Tensor | None
    version: int | None

    def is_current(self) -> bool:
        # Batch-norm kernels and changes through `.data` do not count a new version, and what they change are floats.
        is_float = self.tensor is not None and self.tensor.is_floating_point()
        unchanged = self.module._buffers.get(self.name) is self.tensor and _version(self.tensor) == self.version
        return unchanged and not is_float


class Undo:
    """Remembers the state before a step and puts it back."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self._backend = backend
        self._owners = [(module, name) for module in model.modules() for name in module._buffers]
        self._buffers: dict[tuple[int, str], _Saved] = {}
        self._random_state: dict[str, Any] = {}
        cudnn_dropout.find_for(model)
        fitting(partial(onednn.prepare_for, model), backend, "oneDNN was prepared for an LSTM", " to a new process")

    def remember(self) -> None:
        """Take the state as it is now for the one to go back to."""
        self._random_state = self._backend.random_state()
        for module, name in self._owners:
            key = (id(module), name)
            saved = self._buffers.get(key)
            if saved is not None and saved.is_current():
                continue
            tensor = module._buffers.get(name)  # a module may delete one
            copy = None if tensor is None else tensor.detach().clone()
            self._buffers[key] = _Saved(module, name, tensor, copy, _version(tensor))

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the remembered state."""
        for saved in self._buffers.values():
            if saved.is_current():
                continue
            saved.module._buffers[saved.name] = saved.tensor
            if saved.tensor is not None and saved.copy is not None:
                saved.tensor.copy_(saved.copy)
                saved.version = _version(saved.tensor)
        self._backend.restore_random_state(self._random_state)


def _version(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor._version
