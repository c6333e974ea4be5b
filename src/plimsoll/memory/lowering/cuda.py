"""CUDA as target: what runs there in place of what a CPU trace sees. The parts are files of their own.

Dropout is ``native_dropout``, which keeps a bool mask (on the CPU it is a random tensor of the input's type).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from plimsoll.memory.lowering.attention import scaled_dot_product_attention
from plimsoll.memory.lowering.autocast import cuda_autocast_lists
from plimsoll.memory.lowering.base import Note, Run, fake_modules_can_be_converted, foreach_as_on, kernels_replaced
from plimsoll.memory.lowering.cudnn_rnn import CudnnRnn, weights_flattened
from plimsoll.memory.lowering.packing import PACKING
from plimsoll.memory.lowering.places import Places

aten = torch.ops.aten


class CudaLowering:
    """`Lowering` onto an NVIDIA GPU.

    Args:
        capability: the compute capability, for example ``(8, 6)``.
    """

    kind: Literal["cpu", "cuda"] = "cuda"
    device = "cuda"

    def __init__(self, capability: tuple[int, int]) -> None:
        self.name = f"cuda {capability[0]}.{capability[1]}"
        self._capability = capability
        self._places = Places()

    @contextmanager
    def active(self, note: Note) -> Iterator[None]:
        """Replace what CUDA does otherwise."""
        recurrent = CudnnRnn(note, has_bfloat16=self._capability >= (8, 0))
        kernels: dict[str, Callable[..., Any]] = {
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

    def scratch_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Count what CUDA's kernel takes while it runs, beside its results."""
        count = _SCRATCH_BYTES.get(op)
        return count(*args, **kwargs) if count else 0


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _layer_norm_backward(grad: Tensor, input: Tensor, normalized_shape: list[int], *rest: Any) -> int:
    """Partial sums of the gradients of weight and bias, which many more rows than columns are added up in.

    After ``LaunchGammaBetaBackwardCUDAKernel`` of aten/src/ATen/native/cuda/layer_norm_kernel.cu: beyond 65,536 rows, a
    row of sums for every 32 rows, in a grid of at most 32,768 blocks of 32 columns. It takes this way only where the
    columns are few for the card's multiprocessors, which is taken for granted here.
    """
    weight: Tensor | None = rest[2]
    num_columns = prod(normalized_shape)
    num_rows = input.numel() // num_columns
    if weight is None or num_rows <= 64 * 1024:
        return 0
    num_sums = min(-(-num_rows // 32), 32 * 1024 // -(-num_columns // 32))
    return int(2 * num_sums * num_columns * weight.element_size())


# Cross entropy's backward takes nothing beside its results; attention's is in `attention`.
_SCRATCH_BYTES: dict[Any, Callable[..., int]] = {
    # The indices in order, and where each was (``embedding_dense_backward_cuda``, aten/src/ATen/native/cuda).
    aten.embedding_dense_backward.default: lambda grad, indices, *rest: indices.numel() * 8 * 2,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
