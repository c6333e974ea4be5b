"""Scratch memory that CUDA kernels allocate from torch's allocator in addition to their results.

The rules follow the sources named in each docstring (``aten/src/ATen/native/cuda``), and are tested against the events
and probes of ``tests/recordings``. Buffers of a few bytes for each thread block are ignored. See `attention` for
attention kernels and `cudnn_rnn` for cuDNN's recurrent layers. Cross entropy needs no scratch memory.
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
# Up to this number of indices, the gradient of an embedding is accumulated without sorting. For sorted indices, each
# thread processes this number of rows.
_UNSORTED_INDICES, _ROWS_PER_THREAD = 3072, 10


def scratch_bytes(op: Any, args: tuple[Any, ...], capability: tuple[int, int], num_sms: int) -> Scratch:
    """Return the scratch sizes of an op on a GPU with this compute capability and number of multiprocessors."""
    if op is aten.sum.dim_IntList:
        sums = _column_sums(num_sms, capability, *args)
        return Scratch(after=(sums,)) if sums else NO_SCRATCH
    sizes = _SIZES.get(op)
    return sizes(*args) if sizes else NO_SCRATCH


def _layer_norm_backward(grad: Tensor, input: Tensor, normalized_shape: list[int], *rest: Any) -> Scratch:
    """Return the sizes of the partial sums for the gradients of weight and bias, if there are many rows.

    Follows ``LaunchGammaBetaBackwardCUDAKernel`` of aten/src/ATen/native/cuda/layer_norm_kernel.cu: beyond 65,536 rows,
    a row of sums for every 32 rows, in a grid of at most 32,768 blocks of 32 columns. torch uses this kernel only if
    there are few columns for the card's multiprocessors, which is assumed here.
    """
    weight: Tensor | None = rest[2]
    num_columns = prod(normalized_shape)
    num_rows = input.numel() // num_columns
    if weight is None or num_rows <= 64 * 1024:
        return NO_SCRATCH
    num_sums = min(-(-num_rows // 32), 32 * 1024 // -(-num_columns // 32))
    return Scratch(after=(num_sums * num_columns * weight.element_size(),) * 2)


def _column_sums(num_sms: int, capability: tuple[int, int], input: Tensor, dim: Sequence[int] | None, *_: Any) -> int:
    """Return the bytes of partial column sums of a matrix, one for each group of rows, as in a bias gradient.

    Follows `setReduceConfig` and `ReduceConfig::global_memory_size` of aten/src/ATen/native/cuda/Reduce.cuh. A block
    has 32 by 4 threads, each for up to 4 columns. Rows are distributed over several blocks if a thread would otherwise
    sum 256 rows or more. The scratch memory of sums over the last dimension is small and ignored.
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
    element_bytes = max(input.element_size(), 4)  # half precision is accumulated in float32
    return element_bytes * num_columns * groups * across * width if groups > 1 else 0


def _power_of_two_below(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1


def _threads_of_sm(capability: tuple[int, int]) -> int:
    """Return the threads of a multiprocessor, from the compute capability table in the CUDA C++ Programming Guide."""
    if capability == (7, 5):
        return 1024
    return 1536 if capability in {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)} else 2048


def _embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, *_: Any) -> Scratch:
    """Return the scratch sizes of the gradient of an embedding.

    Follows ``embedding_dense_backward_cuda`` and ``EmbeddingBackwardKernel.cu``: a copy of a non-contiguous gradient,
    the sorted indices, the offsets of their segments, and sums of up to ten rows each in float32.
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
    """Return the size of the product of gradient and output (``softmax_backward_cuda_out`` of ``SoftMax.cu``)."""
    return Scratch(after=(grad.numel() * grad.element_size(),))


_SIZES: dict[Any, Callable[..., Scratch]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._softmax_backward_data.default: _softmax_backward,
}
