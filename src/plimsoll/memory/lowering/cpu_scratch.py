"""Scratch memory of torch's CPU kernels, during one call, and memory that their libraries keep permanently.

Measured with ``benchmarks/_cpu_scratch.py`` (torch 2.13 CPU build, MKL 2024.2, oneDNN 3.12, AVX-512, float32) around
every op of 35 forward and backward passes. An op that is not listed used less than 0.4 MiB. Matrix products, layer
norm, GELU, dropout, cross entropy, the embedding's forward and AdamW used only the memory that MKL keeps
(`KEPT_BYTES`).

Rules read only ``shape``, ``element_size()``, ``transpose()`` and ``is_contiguous()`` of tensor arguments, so fake
tensors work. Not covered: dtypes other than float32 (except in oneDNN's LSTM), recurrent nets of several layers or
directions in one call (torch makes none), other builds of torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from plimsoll.memory.lowering.mkldnn_rnn import written_in_backward_bytes
from plimsoll.records.prediction import Estimate

_MIB = 1 << 20
_WITHOUT_BFLOAT16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}


class Kept(NamedTuple):
    """Memory in bytes that a library allocates at first use and keeps: the likely, smallest and largest amount."""

    bytes: int
    least_bytes: int
    most_bytes: int
    is_per_thread: bool
    reason: str


KEPT_BYTES: Mapping[str, Kept] = {
    "matmul": Kept(
        bytes=5 * _MIB,
        least_bytes=_MIB // 2,
        most_bytes=12 * _MIB,
        is_per_thread=True,
        reason="MKL packs its operands into a buffer of up to 5 MiB per thread (1.1 MiB for [2048, 1024] by [1024, "
        "1024], 3.3 for [2048, 256] by [256, 8000], 5.0 for [2048, 768] by [768, 50257]; twice that with two "
        "threads), and keeps it for later products: 4 and 12 MiB in GPT-2 steps, found with MKL_DISABLE_FAST_MM",
    ),
    "recurrent": Kept(
        bytes=10 * _MIB // 3,
        least_bytes=16 * _MIB // 5,
        most_bytes=17 * _MIB // 5,
        is_per_thread=False,
        reason="oneDNN generates code for the LSTM at its first use: 3.2 to 3.4 MiB for each of 8 shapes, with one "
        "thread or two",
    ),
}


def kept_by_libraries(op_names: Iterable[str], num_threads: int = 1) -> Estimate:
    """Return the memory that libraries keep in a training run with these ops and threads."""
    is_recurrent = any(name.startswith("aten.mkldnn_rnn_layer.") for name in op_names)
    kept = [KEPT_BYTES["matmul"], *([KEPT_BYTES["recurrent"]] if is_recurrent else [])]
    times = [num_threads if one.is_per_thread else 1 for one in kept]
    likely_bytes = sum(one.bytes * number for one, number in zip(kept, times, strict=True))
    return Estimate(
        likely_bytes=likely_bytes,
        low_bytes=sum(one.least_bytes * number for one, number in zip(kept, times, strict=True)),
        high_bytes=sum(one.most_bytes * number for one, number in zip(kept, times, strict=True)),
        modelled_bytes=likely_bytes,
    )


def scratch_bytes(
    op_name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, num_threads: int = 1
) -> int:
    """Return the bytes of scratch memory that an op uses while it runs; 0 if it uses none.

    Args:
        op_name: name of the overload, such as ``"aten.convolution.default"``.
        args: positional arguments of the op.
        kwargs: keyword arguments of the op.
        num_threads: number of torch's threads.
    """
    rule = _RULES.get(op_name.removeprefix("aten.").partition(".")[0])
    return rule(args, num_threads) if rule is not None else 0


def _bytes(tensor: Any) -> int:
    return int(math.prod(tensor.shape) * tensor.element_size())


def _rnn_output_bytes(args: Sequence[Any]) -> int:
    steps, rows = args[0].shape[:2]
    return int(steps * rows * args[2].shape[1] * args[0].element_size())  # the recurrent weight is [gates, hidden]


def _rnn(args: Sequence[Any], num_threads: int) -> int:
    """Return the bytes of both weight matrices in oneDNN's layout, and of the four gates of every step in float32.

    In half precision, input and gates are multiplied step by step (``n_iter_scratch_gates``) if the processor supports
    it. Otherwise, the gates of every step are stored in float32.
    """
    is_half, output_bytes = args[0].element_size() < 4, _rnn_output_bytes(args)
    gates_bytes = 4 * output_bytes if not is_half else 0 if _has_bfloat16() else 8 * output_bytes
    return gates_bytes + _bytes(args[1]) + _bytes(args[2])


def _rnn_backward(args: Sequence[Any], num_threads: int) -> int:
    """Return the scratch bytes of the backward of an LSTM layer.

    Both weight matrices and their gradients are stored in oneDNN's layout. In float32, the four gates of every step are
    stored as well. In half precision, the output's gradient is stored in float32, and also those gates if the processor
    lacks bfloat16. A non-contiguous gradient is copied. The part of the workspace that only backward writes becomes
    resident.
    """
    output_bytes = _rnn_output_bytes(args)
    copied_bytes = 0 if args[10] is None or args[10].is_contiguous() else output_bytes
    is_half = args[0].element_size() < 4
    kept_bytes = (2 if _has_bfloat16() else 6) * output_bytes if is_half else 4 * output_bytes
    return kept_bytes + copied_bytes + 2 * (_bytes(args[1]) + _bytes(args[2])) + written_in_backward_bytes(tuple(args))


@cache
def _has_bfloat16() -> bool:
    """Return whether oneDNN multiplies with bfloat16 instructions, which environment variables can disable."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return torch.cpu._is_avx512_bf16_supported() and most.upper() not in _WITHOUT_BFLOAT16


def _safe_softmax(args: Sequence[Any], num_threads: int) -> int:
    """Return the bytes of a boolean for each score, which marks rows that are masked completely."""
    return int(math.prod(args[0].shape))


def _flash(args: Sequence[Any], num_threads: int) -> int:
    """Return the bytes of a tile of scores and a tile of results for each thread."""
    rows, columns = _flash_tile(args[0].shape[-2], args[1].shape[-2])
    return num_threads * rows * (columns + int(args[0].shape[-1])) * 4


def _flash_backward(args: Sequence[Any], num_threads: int) -> int:
    """Return the bytes of two tiles for each thread, and of the gradient's copy if it is not [batch, token, head]."""
    rows, columns = _flash_tile(args[1].shape[-2], args[2].shape[-2])
    copied_bytes = 0 if args[0].transpose(1, 2).is_contiguous() else _bytes(args[0])
    return num_threads * 2 * rows * columns * 4 + copied_bytes


def _flash_tile(num_queries: int, num_keys: int) -> tuple[int, int]:
    # From FlashAttentionKernel.cpp: 256 rows for 768 or more queries, 64 for 192 or more; 512 columns.
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _convolution(args: Sequence[Any], num_threads: int) -> int:
    """Return the larger of the bytes of input and output in oneDNN's layout, because the two copies never coexist."""
    images, weight = args[0], args[1]
    pixels = 1
    for axis, length in enumerate(images.shape[2:]):
        stride, padding, dilation = (_along(args[index], axis) for index in (3, 4, 5))
        pixels *= (length + 2 * padding - dilation * (weight.shape[2 + axis] - 1) - 1) // stride + 1
    output_bytes = int(images.shape[0] * weight.shape[0] * pixels * images.element_size())
    return max(_bytes(images), output_bytes)


def _along(setting: Sequence[int], axis: int) -> int:
    return int(setting[axis] if len(setting) > 1 else setting[0])


def _convolution_backward(args: Sequence[Any], num_threads: int) -> int:
    """Return the bytes of the output's gradient and the input in oneDNN's layout."""
    return _bytes(args[0]) + _bytes(args[1])


def _embedding_backward(args: Sequence[Any], num_threads: int) -> int:
    """Return the bytes of a contiguous copy of the gradient; 0 if it is contiguous. A transposed batch needs a copy."""
    return 0 if args[0].is_contiguous() else _bytes(args[0])


_RULES: Mapping[str, Callable[[Sequence[Any], int], int]] = {
    "mkldnn_rnn_layer": _rnn,
    "mkldnn_rnn_layer_backward": _rnn_backward,
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_flash_attention_for_cpu": _flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
}
