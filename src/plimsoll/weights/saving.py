"""Writing of model weights to one safetensors file, even if several weights share one storage.

cuDNN's recurrent layers keep all weights in one buffer, which safetensors refuses to write. Such weights are first
copied to the host; nothing else is copied. Tied weights are written once, as ``safetensors.torch.save_model`` does.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the parameters and buffers of ``model`` to ``path``.

    Raises:
        OSError, safetensors.SafetensorError: if the file cannot be written.
    """
    save_model(_WithoutSharedStorages(model), str(path))  # type: ignore[arg-type]  # it only calls `state_dict`


class _WithoutSharedStorages:
    """A wrapper of a model with a state dict for safetensors.

    Tensors that are different parts of the same storage are copied to the host, so each has its own storage.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._model.state_dict()
        parts = defaultdict(set)
        for tensor in state.values():
            parts[tensor.untyped_storage()._cdata].add(_elements(tensor))
        copies: dict[Any, Tensor] = {}
        for name, tensor in state.items():
            if len(parts[tensor.untyped_storage()._cdata]) > 1:
                key = (tensor.untyped_storage()._cdata, _elements(tensor))
                if key not in copies:
                    copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
                state[name] = copies[key]
        return state


def _elements(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors of one storage if they are the same elements in the same shape."""
    return (tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
