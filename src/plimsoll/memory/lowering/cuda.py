"""CUDA as target: what runs there in place of what a CPU trace sees. The parts are files of their own.

Dropout is ``native_dropout``, which keeps a bool mask (on the CPU it is a random tensor of the input's type).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        num_sms: multiprocessors, over which some kernels spread; by default those of an H200.
    """

    kind: Literal["cpu", "cuda"] = "cuda"
    device = "cuda"

    def __init__(self, capability: tuple[int, int], num_sms: int = 132) -> None:
        self._num_sms = num_sms
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
        if op is aten.sum.dim_IntList:
            return _column_sums(self._num_sms, self._capability, *args)
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


def _column_sums(num_sms: int, capability: tuple[int, int], input: Tensor, dim: Sequence[int] | None, *_: Any) -> int:
    """Partial sums of a matrix's columns, as the gradient of a bias is: those of each group of rows.

    After `setReduceConfig` and `ReduceConfig::global_memory_size` of aten/src/ATen/native/cuda/Reduce.cuh. Threads of a
    block are 32 times 4 and take up to 4 columns each; rows are shared out over blocks where a thread had 256 or more.
    Sums over rows (of the last dimension) need a few values only.
    """
    num_summed = len(dim) if dim else input.dim()
    if num_summed == input.dim() or sorted(axis % input.dim() for axis in dim or ()) != [*range(num_summed)]:
        return 0
    num_rows, num_columns = prod(input.shape[:num_summed]), prod(input.shape[num_summed:])
    if not input.is_contiguous() or not num_columns:
        return 0
    width = next(width for width in (4, 2, 1) if num_columns % width == 0)
    across = min(32, _power_of_two_below(num_columns // width))
    down = min(_power_of_two_below(num_rows), _MOST_REDUCING_THREADS // width // across)
    rows_of_thread = -(-num_rows // down)
    if num_rows < min(16 * down, 256) or rows_of_thread < 256:
        return 0
    num_blocks = -(-num_columns // width // across)
    wanted = num_sms * (_threads_of_sm(capability) // (across * down))
    if num_blocks > wanted:
        return 0
    groups = max(min(-(-wanted // num_blocks), -(-rows_of_thread // 16)), -(-rows_of_thread // 256))
    element_bytes = max(input.element_size(), 4)  # halves are added up in float32
    return element_bytes * num_columns * groups * across * width if groups > 1 else 0


_MOST_REDUCING_THREADS = 512


def _power_of_two_below(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1


def _threads_of_sm(capability: tuple[int, int]) -> int:
    """How many threads a multiprocessor holds: the table of compute capabilities in the CUDA C++ Programming Guide."""
    if capability == (7, 5):
        return 1024
    return 1536 if capability in {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)} else 2048


# Cross entropy's backward takes nothing beside its results; attention's is in `attention`.
_SCRATCH_BYTES: dict[Any, Callable[..., int]] = {
    # The indices in order, and where each was (``embedding_dense_backward_cuda``, aten/src/ATen/native/cuda).
    aten.embedding_dense_backward.default: lambda grad, indices, *rest: indices.numel() * 8 * 2,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
