"""What CUDA's kernels take from torch's allocator while they run, beside their results.

After the sources named with each rule (``aten/src/ATen/native/cuda``), held against the events and the probes of
``tests/recordings``. Buffers of a few bytes for each block of threads are left out. What attention takes is in
`attention`, cuDNN's recurrent nets in `cudnn_rnn`; cross entropy takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from plimsoll.memory.lowering.base import NO_SCRATCH, Scratch

aten = torch.ops.aten

_MOST_REDUCING_THREADS = 512
# Up to so many indices the gradient of an embedding is added up without sorting them; of the sorted ones a thread takes
# so many rows.
_UNSORTED_INDICES, _ROWS_PER_THREAD = 3072, 10


def scratch_bytes(op: Any, args: tuple[Any, ...], capability: tuple[int, int], num_sms: int) -> Scratch:
    """Return the sizes of what an op takes on a GPU of that capability with so many multiprocessors."""
    if op is aten.sum.dim_IntList:
        sums = _column_sums(num_sms, capability, *args)
        return Scratch(after=(sums,)) if sums else NO_SCRATCH
    sizes = _SIZES.get(op)
    return sizes(*args) if sizes else NO_SCRATCH


def _layer_norm_backward(grad: Tensor, input: Tensor, normalized_shape: list[int], *rest: Any) -> Scratch:
    """Partial sums of the gradients of weight and bias, which many more rows than columns are added up in.

    After ``LaunchGammaBetaBackwardCUDAKernel`` of aten/src/ATen/native/cuda/layer_norm_kernel.cu: beyond 65,536 rows, a
    row of sums for every 32 rows, in a grid of at most 32,768 blocks of 32 columns. It takes this way only where the
    columns are few for the card's multiprocessors, which is taken for granted here.
    """
    weight: Tensor | None = rest[2]
    num_columns = prod(normalized_shape)
    num_rows = input.numel() // num_columns
    if weight is None or num_rows <= 64 * 1024:
        return NO_SCRATCH
    num_sums = min(-(-num_rows // 32), 32 * 1024 // -(-num_columns // 32))
    return Scratch(after=(num_sums * num_columns * weight.element_size(),) * 2)


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


def _power_of_two_below(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1


def _threads_of_sm(capability: tuple[int, int]) -> int:
    """How many threads a multiprocessor holds: the table of compute capabilities in the CUDA C++ Programming Guide."""
    if capability == (7, 5):
        return 1024
    return 1536 if capability in {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)} else 2048


def _embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, *_: Any) -> Scratch:
    """A copy of the gradient where it is not contiguous; then the sorted indices, where the rows of each begin, and
    sums of up to ten rows each, in float32 (``embedding_dense_backward_cuda`` and ``EmbeddingBackwardKernel.cu``).
    """
    copied = () if grad.is_contiguous() else (grad.numel() * grad.element_size(),)
    count = indices.numel()
    if count <= _UNSORTED_INDICES:
        return Scratch(copied)
    segments = min(count, num_weights)
    parts = count // _ROWS_PER_THREAD + segments
    sums_bytes = parts * grad.shape[-1] * max(grad.element_size(), 4)
    return Scratch((*copied, 8 * count, 8 * count), (8 * count, 8 * segments, 8 * segments, 8 * parts, sums_bytes))


def _softmax_backward(grad: Tensor, *_: Any) -> Scratch:
    """The product of gradient and output (``softmax_backward_cuda_out`` of ``SoftMax.cu``)."""
    return Scratch(after=(grad.numel() * grad.element_size(),))


_SIZES: dict[Any, Callable[..., Scratch]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._softmax_backward_data.default: _softmax_backward,
}
