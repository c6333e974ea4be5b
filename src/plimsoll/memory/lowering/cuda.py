"""CUDA as target: what runs there in place of what a CPU trace sees. The parts are files of their own.

Dropout is ``native_dropout``, which keeps a bool mask (on the CPU it is a random tensor of the input's type).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from plimsoll.memory.lowering.attention import scaled_dot_product_attention
from plimsoll.memory.lowering.autocast import cuda_autocast_lists
from plimsoll.memory.lowering.base import (
    LINEAR,
    Note,
    Run,
    Scratch,
    fake_modules_can_be_converted,
    foreach_as_on,
    kernels_replaced,
    tensors_of,
)
from plimsoll.memory.lowering.cuda_scratch import scratch_bytes
from plimsoll.memory.lowering.cudnn_rnn import CudnnRnn, weights_flattened
from plimsoll.memory.lowering.packing import PACKING
from plimsoll.memory.lowering.places import Places

aten = torch.ops.aten

_MADE = {
    aten.native_dropout.default: (1, 0),  # the mask first (``dropout_cuda`` of ``Dropout.cu``)
    # Its seed and offset stay on the CPU unless a graph is captured.
    aten._scaled_dot_product_efficient_attention.default: (0, 1),
}


class CudaLowering:
    """`Lowering` onto an NVIDIA GPU.

    Args:
        capability: the compute capability, for example ``(8, 6)``.
        num_sms: multiprocessors, over which some kernels spread; by default those of an H200.
    """

    kind: Literal["cpu", "cuda"] = "cuda"
    device = "cuda"

    def __init__(self, capability: tuple[int, int], num_sms: int = 132) -> None:
        self.num_sms = num_sms
        self.name = f"cuda {capability[0]}.{capability[1]}"
        self._capability = capability
        self._places = Places()

    @contextmanager
    def active(self, note: Note) -> Iterator[None]:
        """Replace what CUDA does otherwise."""
        recurrent = CudnnRnn(note, has_bfloat16=self._capability >= (8, 0))
        kernels: dict[str, Callable[..., Any]] = {
            **LINEAR,
            **PACKING,
            "dropout": _dropout,
            "scaled_dot_product_attention": partial(scaled_dot_product_attention, capability=self._capability),
            "lstm_cell": recurrent.lstm_cell,
            "gru_cell": recurrent.gru_cell,
        }
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            kernels |= {f"{name}.{overload}": getattr(recurrent, name) for overload in ("input", "data")}
        with (
            foreach_as_on(("cpu", "cuda", "xpu")),
            fake_modules_can_be_converted(),
            cuda_autocast_lists(),
            kernels_replaced(kernels),
            weights_flattened(self._places.on_host),
            self._places,
        ):
            yield

    def loaded(self, tensor: Tensor) -> Tensor:
        """Let a tensor be in the host's memory."""
        return self._places.put_on_host(tensor)

    def run_with(self, run: Run) -> Run:
        """Follow which tensors are on the device."""
        return self._places.run_with(run)

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the host's memory."""
        return self._places.on_host(tensor)

    def unwritten(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """Return that all counts: torch's allocator on CUDA has no memory that is not there."""
        return None

    def scratch_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch:
        """Give the sizes of what CUDA's kernel takes while it runs, beside its results."""
        return scratch_bytes(op, args, self._capability, self.num_sms)

    def made(self, op: Any, result: Any) -> Iterable[Tensor]:
        """Return what lies on the device, in order: `_MADE` names the results of kernels with an order of their own."""
        return [result[index] for index in _MADE[op]] if op in _MADE else tensors_of(op, result)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
