"""What torch's ops take on a CPU beside the tensors they return: for the length of a call, and for good.

Measured by ``benchmarks/_cpu_scratch.py`` (torch 2.13 CPU build, MKL 2024.2, oneDNN 3.12, AVX-512, float32) around
every op of 35 forward and backward passes; an op that is not named here took less than 0.4 MiB. Matrix products, layer
norm, GELU, dropout, cross entropy, the embedding's forward and AdamW took nothing but what MKL keeps (`KEPT_BYTES`).

Arguments are the op's own; of a tensor only ``shape``, ``element_size()``, ``transpose()`` and ``is_contiguous()`` are
asked, so fake tensors will do. Not covered: other types than float32 (but for oneDNN's LSTM), recurrent nets of several
layers or directions in one call (torch makes none), other builds of torch.
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
    """What a library takes at its first use and keeps."""

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
        reason="MKL packs its operands into buffers of each thread, of up to 5 MiB (1.1 MiB for [2048, 1024] by "
        "[1024, 1024], 3.3 for [2048, 256] by [256, 8000], 5.0 for [2048, 768] by [768, 50257]; twice that with two "
        "threads), and keeps them for later products: in GPT-2 steps 4 and 12 MiB, told by MKL_DISABLE_FAST_MM",
    ),
    "recurrent": Kept(
        bytes=10 * _MIB // 3,
        least_bytes=16 * _MIB // 5,
        most_bytes=17 * _MIB // 5,
        is_per_thread=False,
        reason="oneDNN writes code for the LSTM at its first use: 3.2 to 3.4 MiB for each of 8 shapes, alike with one "
        "thread and two",
    ),
}


def kept_by_libraries(op_names: Iterable[str], num_threads: int = 1) -> Estimate:
    """Add up what the libraries keep of a training that runs these ops with that many threads."""
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
    """Return what an op takes beside its results while it runs; 0 for an op that takes nothing.

    ``op_name`` is the overload's, such as ``"aten.convolution.default"``.
    """
    rule = _RULES.get(op_name.removeprefix("aten.").partition(".")[0])
    return rule(args, num_threads) if rule is not None else 0


def _bytes(tensor: Any) -> int:
    return int(math.prod(tensor.shape) * tensor.element_size())


def _rnn_output_bytes(args: Sequence[Any]) -> int:
    steps, rows = args[0].shape[:2]
    return int(steps * rows * args[2].shape[1] * args[0].element_size())  # the recurrent weight: [gates, hidden]


def _rnn(args: Sequence[Any], num_threads: int) -> int:
    """Both weights in oneDNN's layout, and in float32 the four gates of every step from the input.

    In half precision the products of input and gates are made step by step (``n_iter_scratch_gates``), if the processor
    has it; else the gates of every step are there in float32.
    """
    is_half, output_bytes = args[0].element_size() < 4, _rnn_output_bytes(args)
    gates_bytes = 4 * output_bytes if not is_half else 0 if _has_bfloat16() else 8 * output_bytes
    return gates_bytes + _bytes(args[1]) + _bytes(args[2])


def _rnn_backward(args: Sequence[Any], num_threads: int) -> int:
    """Both weights and their gradients in oneDNN's layout; in float32 the four gates of every step, in half precision
    the output's gradient in float32 and, if the processor has no bfloat16, those gates; that gradient once more if it
    is not contiguous; and what is now written of the workspace that the forward left untouched, until it is freed.
    """
    output_bytes = _rnn_output_bytes(args)
    copied_bytes = 0 if args[10] is None or args[10].is_contiguous() else output_bytes
    is_half = args[0].element_size() < 4
    kept_bytes = (2 if _has_bfloat16() else 6) * output_bytes if is_half else 4 * output_bytes
    return kept_bytes + copied_bytes + 2 * (_bytes(args[1]) + _bytes(args[2])) + written_in_backward_bytes(tuple(args))


@cache
def _has_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 by instructions of the processor, which it may be told not to use."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return torch.cpu._is_avx512_bf16_supported() and most.upper() not in _WITHOUT_BFLOAT16


def _safe_softmax(args: Sequence[Any], num_threads: int) -> int:
    """A boolean for each score: which rows are masked out altogether."""
    return int(math.prod(args[0].shape))


def _flash(args: Sequence[Any], num_threads: int) -> int:
    """A tile of scores and one of results for each thread."""
    rows, columns = _flash_tile(args[0].shape[-2], args[1].shape[-2])
    return num_threads * rows * (columns + int(args[0].shape[-1])) * 4


def _flash_backward(args: Sequence[Any], num_threads: int) -> int:
    """Two tiles for each thread, and the gradient laid out as [batch, token, head] where it is not."""
    rows, columns = _flash_tile(args[1].shape[-2], args[2].shape[-2])
    copied_bytes = 0 if args[0].transpose(1, 2).is_contiguous() else _bytes(args[0])
    return num_threads * 2 * rows * columns * 4 + copied_bytes


def _flash_tile(num_queries: int, num_keys: int) -> tuple[int, int]:
    # From FlashAttentionKernel.cpp: 256 rows from 768 queries on, 64 from 192 on; 512 columns.
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _convolution(args: Sequence[Any], num_threads: int) -> int:
    """The input in oneDNN's layout, then the output in it: not both at once."""
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
    """The output's gradient and the input, both in oneDNN's layout."""
    return _bytes(args[0]) + _bytes(args[1])


def _embedding_backward(args: Sequence[Any], num_threads: int) -> int:
    """The gradient once more where it is not contiguous, as behind a transposed batch."""
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
