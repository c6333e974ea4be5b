"""The state of the dropout between the layers of a recurrent net on CUDA, which no generator of torch holds.

cuDNN (and MIOpen) draw that dropout from a buffer of their own (``aten/src/ATen/native/cudnn/RNN.cpp``, torch 2.11 and
2.13). torch makes it, seeded from the device's generator, in the first training pass after the generator was seeded or
set; from then on each pass changes it in place. Python sees neither the buffer nor whether a new one is due. So a tiny
net is run: a dispatch mode sees the buffer that its kernel is given as ``dropout_state``, and the generator moves only
where a new one was due. With the state put back, a step that is done again, or a resumed run, draws the same masks.

Does NOT cover recomputation by ``torch.utils.checkpoint``, which sets the generator and so draws other masks than the
forward pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_ARGUMENT = "dropout_state"
_IN_USE: set[int] = set()
"""The devices on which some model has such a dropout."""


def find_for(model: nn.Module) -> None:
    """Have the state of a device copied from now on if the model has dropout between recurrent layers there."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            device = next(module.parameters()).device
            if device.type == "cuda":
                _IN_USE.add(torch.cuda.current_device() if device.index is None else device.index)


def copied_state(index: int) -> Tensor | None:
    """Copy the state of a device; ``None`` where it is not in use, or is drawn anew in the next pass anyway."""
    if index not in _IN_USE:
        return None
    generator = torch.cuda.default_generators[index]
    before, offset = generator.clone_state(), generator.get_offset()
    seen = _run(index)
    is_due = generator.get_offset() != offset
    generator.graphsafe_set_state(before)
    if is_due:
        generator.set_state(generator.get_state())  # so that it is due again
        return None
    if seen is None:
        return None
    seen.buffer.copy_(seen.content)
    return seen.content


def put_back(index: int, state: Tensor) -> None:
    """Put a copied state back, after the generator was set: the next pass goes on from it."""
    _IN_USE.add(index)
    generator = torch.cuda.default_generators[index]
    before = generator.clone_state()
    seen = _run(index)  # makes the buffer that is due
    generator.graphsafe_set_state(before)  # which, unlike `set_state`, makes no other one due
    if seen is not None:
        seen.buffer.copy_(state)


class _Seen(NamedTuple):
    """The buffer that a kernel was given, and what was in it before."""

    buffer: Tensor
    content: Tensor


@cache
def _net(index: int) -> nn.LSTM:
    with torch.random.fork_rng(devices=()):  # made on the host: the generator of the device is not touched
        return nn.LSTM(1, 1, num_layers=2, dropout=0.5).to(torch.device("cuda", index))


def _run(index: int) -> _Seen | None:
    watch = _Watch()  # type: ignore[no-untyped-call]
    with torch.no_grad(), watch:
        _net(index)(torch.zeros(1, 1, 1, device=torch.device("cuda", index)))
    seen: _Seen | None = watch.seen
    return seen


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the state that a recurrent kernel is given."""

    seen: _Seen | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.name == _ARGUMENT and value is not None:
                self.seen = _Seen(value, value.clone())
        return func(*args, **(kwargs or {}))
