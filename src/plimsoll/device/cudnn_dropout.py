"""The state of the dropout between the layers of a recurrent net on CUDA, which no generator of torch holds.

cuDNN (and MIOpen) draw that dropout from a buffer of their own. torch makes one for each device at its first use,
seeded from the device's generator, and gives it to every kernel as ``dropout_state``, which changes it in place. Only a
dispatch mode sees it. Once it is known, ``random_state`` of `plimsoll.device.cuda` copies it with the generators, so
that a step that is done again, and a run that is resumed, draw the same masks.

Does NOT cover recomputation by ``torch.utils.checkpoint``, which restores torch's generators alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_ARGUMENT = "dropout_state"
_STATES: dict[int, Tensor] = {}
"""The buffer of each device, by its index; torch never frees or replaces one."""


def find_for(model: nn.Module) -> None:
    """Find the buffers of the devices on which a model has dropout between recurrent layers."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            device = next(module.parameters()).device
            if device.type == "cuda":
                state_of(torch.cuda.current_device() if device.index is None else device.index)


def known_state(index: int) -> Tensor | None:
    """Return the buffer of a device, ``None`` where it was not looked for or is not used."""
    return _STATES.get(index)


def state_of(index: int) -> Tensor | None:
    """Return the buffer of a device and make it if need be; generators stay as they are. ``None`` without cuDNN."""
    if index not in _STATES:
        with torch.random.fork_rng([index]), torch.no_grad(), _Watch() as watch:  # type: ignore[no-untyped-call]
            layers = nn.LSTM(1, 1, num_layers=2, dropout=0.5, device=torch.device("cuda", index))
            layers(torch.zeros(1, 1, 1, device=torch.device("cuda", index)))
        if watch.seen is not None:
            _STATES[index] = watch.seen
    return _STATES.get(index)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the state that a recurrent kernel is given."""

    seen: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.name == _ARGUMENT and value is not None:
                self.seen = value
        return func(*args, **(kwargs or {}))
