"""The random state of dropout between recurrent layers on CUDA, which no torch generator holds.

cuDNN (and MIOpen) draw this dropout from a separate buffer (``aten/src/ATen/native/cudnn/RNN.cpp``, torch 2.11 and
2.13). torch creates the buffer, seeded from the device's generator, in the first training pass after the generator was
seeded or set. Each later pass changes it in place. Restoring it makes a repeated step or a resumed run draw the same
masks.

Python cannot access the buffer, or find out whether the next pass creates a new buffer, so a tiny network is run. A
dispatch mode receives the buffer as the kernel's ``dropout_state``. The generator advances only if a new buffer was
created.

Does NOT cover recomputation by ``torch.utils.checkpoint``: it sets the generator, so its masks differ from the forward
pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_ARGUMENT = "dropout_state"
_IN_USE: set[int] = set()
"""Indices of the CUDA devices on which some model has dropout between recurrent layers."""


def find_for(model: nn.Module) -> None:
    """Enable copying of cuDNN's dropout state on each device where the model has dropout between recurrent layers."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            device = next(module.parameters()).device
            if device.type == "cuda":
                _IN_USE.add(torch.cuda.current_device() if device.index is None else device.index)


def copied_state(index: int) -> Tensor | None:
    """Return a copy of cuDNN's dropout state on device ``index``.

    The result is ``None`` if no model on this device has dropout between recurrent layers. It is also ``None`` if the
    next forward pass creates a new state.
    """
    if index not in _IN_USE:
        return None
    generator = torch.cuda.default_generators[index]
    before, offset = generator.clone_state(), generator.get_offset()
    seen = _run(index)
    is_due = generator.get_offset() != offset
    generator.graphsafe_set_state(before)
    if is_due:
        generator.set_state(generator.get_state())  # so that the next pass creates a new buffer again
        return None
    if seen is None:
        return None
    seen.buffer.copy_(seen.content)
    return seen.content


def put_back(index: int, state: Tensor) -> None:
    """Restore a copy of cuDNN's dropout state on device ``index``, from which the next forward pass continues.

    Call this after the state of the device's generator was set.
    """
    _IN_USE.add(index)
    generator = torch.cuda.default_generators[index]
    before = generator.clone_state()
    seen = _run(index)  # creates the new buffer
    generator.graphsafe_set_state(before)  # unlike `set_state`, this does not make the next pass create a new buffer
    if seen is not None:
        seen.buffer.copy_(state)


class _Seen(NamedTuple):
    """The dropout buffer that a kernel received, and a copy of its content from before the kernel ran."""

    buffer: Tensor
    content: Tensor


@cache
def _net(index: int) -> nn.LSTM:
    with torch.random.fork_rng(devices=()):  # created on the host, so that the generator of the device does not advance
        return nn.LSTM(1, 1, num_layers=2, dropout=0.5).to(torch.device("cuda", index))


def _run(index: int) -> _Seen | None:
    watch = _Watch()  # type: ignore[no-untyped-call]
    with torch.no_grad(), watch:
        _net(index)(torch.zeros(1, 1, 1, device=torch.device("cuda", index)))
    seen: _Seen | None = watch.seen
    return seen


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the dropout state passed to a recurrent kernel."""

    seen: _Seen | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.name == _ARGUMENT and value is not None:
                self.seen = _Seen(value, value.clone())
        return func(*args, **(kwargs or {}))
