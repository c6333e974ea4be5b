"""Lowering to CUDA, composed of the replacements in the other modules of this package.

Dropout is ``native_dropout``, which saves a bool mask for backward. The CPU version saves a random tensor of the
input's type.
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
    # Seed and offset stay on the CPU, unless a graph is captured.
    aten._scaled_dot_product_efficient_attention.default: (0, 1),
}


class CudaLowering:
    """`Lowering` to an NVIDIA GPU.

    Args:
        capability: the compute capability, for example ``(8, 6)``.
        num_sms: number of multiprocessors, which determines the scratch memory of some kernels. The default is the
            number on an H200.
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
        """Replace the ops that differ on CUDA until the context exits."""
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
        """Mark a batch tensor as being in host memory, where a data loader puts it, and return it."""
        return self._places.put_on_host(tensor)

    def run_with(self, run: Run) -> Run:
        """Wrap the function that executes an op, and track which tensors are on the device."""
        return self._places.run_with(run)

    def on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory."""
        return self._places.on_host(tensor)

    def unwritten(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """Return ``None``: CUDA memory is allocated in full, whether it is written or not."""
        return None

    def scratch_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch:
        """Return the scratch sizes of the CUDA kernel of an op."""
        return scratch_bytes(op, args, self._capability, self.num_sms)

    def made(self, op: Any, result: Any) -> Iterable[Tensor]:
        """Return the results on the device, in order of allocation; `_MADE` lists kernels with a special order."""
        return [result[index] for index in _MADE[op]] if op in _MADE else tensors_of(op, result)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
