"""CUDA's `scaled_dot_product_attention` on fake tensors, with the memory that its kernels use.

`scaled_dot_product_attention` runs the op of the kernel that CUDA selects (`attention_choice`). It transforms the
inputs as ``aten/src/ATen/native/transformers/attention.cpp`` does, and allocates the kernel's memory. Sources are
``cuda/flash_attn/flash_api.cpp`` (mha_bwd), ``cuda/attention_backward.cu``, and ``mem_eff_attention/kernel_backward.h``
with ``kernels/cutlassB.h``. Scratch memory is a byte tensor that lives as long as the kernel would run, so that a
recorder sees it.

Does NOT cover a batch above 65,535, and flash's split of the keys in a forward pass with few blocks. For cuDNN, it
allocates the workspace according to cudnn-frontend's ``scaled_dot_product_flash_attention.h``, without memory that
cuDNN adds. The tile of the efficient kernel depends on shared memory, and is a guess if torch has several: compute
capabilities 7.0, 8.0, 9.x and 10.x are assumed to fit the larger tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plimsoll.memory.lowering.attention_choice import HALF, Call, Capability, choose_backend
from plimsoll.memory.lowering.autocast import cast_to_lower_precision

aten = torch.ops.aten
# Multiprocessors of A100, H100 and B200. The deterministic flash backward splits the keys by this number; other cards
# count as large ones.
_MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}
_MOST_MULTIPROCESSORS = 188


def scaled_dot_product_attention(  # noqa: PLR0917 -- torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: Capability,
) -> Tensor:
    """Run the attention kernel that CUDA would select on fake tensors, and allocate the same memory.

    Args:
        query: as in `torch.nn.functional.scaled_dot_product_attention`; so are the next seven arguments.
        key: see `query`.
        value: see `query`.
        attn_mask: see `query`.
        dropout_p: see `query`.
        is_causal: see `query`.
        scale: see `query`.
        enable_gqa: see `query`.
        capability: compute capability of the target.

    Raises:
        DeviceError: if no enabled kernel supports these inputs.
    """
    query, key, value, mask = cast_to_lower_precision(query, key, value, attn_mask)  # type: ignore[assignment]
    with _below_autocast():
        trains = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        call = Call(
            query.shape,
            key.shape,
            value.shape,
            query.dtype,
            has_mask=mask is not None,
            mask_requires_grad=mask is not None and mask.requires_grad,
            dropout_p=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            requires_grad=trains,
            capability=capability,
            mask_shape=None if mask is None else mask.shape,
            last_strides_are_one=all(one is None or one.stride(-1) == 1 for one in (query, key, value, mask)),
        )
        backend = choose_backend(call)
        own_scale = query.shape[-1] ** -0.5 if scale is None else scale
        how = How(trains, dropout_p, is_causal, own_scale, enable_gqa, capability)
        if backend == "math":
            return _math(query, key, value, _as_addend(mask, query.dtype), how)
        if backend == "flash":
            return _flash(query, key, value, how)
        if backend == "efficient":
            bias = _efficient_bias(_as_addend(mask, query.dtype), query, key)
            return _apply(_Efficient, query, key, value, bias, how)
        return _apply(_CuDNN, query, key, value, _as_addend(mask, query.dtype, -65504.0), how)


class How(NamedTuple):
    """Parameters that every attention kernel takes in addition to tensors.

    ``trains``: whether gradients are computed for query, key or value.
    """

    trains: bool
    dropout_p: float
    is_causal: bool
    scale: float
    enable_gqa: bool
    capability: Capability


@contextmanager
def _below_autocast() -> Iterator[None]:
    """Disable autocast: only the called op is in the autocast lists, not the ops inside it."""
    if not torch.is_autocast_enabled("cpu"):
        yield
        return
    with torch.autocast("cpu", enabled=False):
        yield


def _apply(kernel: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = kernel.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def _as_addend(mask: Tensor | None, dtype: torch.dtype, of_masked: float = -math.inf) -> Tensor | None:
    """Return a mask as a tensor to add to the scores.

    A boolean mask is converted (`convert_boolean_attn_mask`): False becomes ``of_masked``, and True becomes 0.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    kept, masked = (torch.scalar_tensor(one, dtype=dtype, device=mask.device) for one in (0.0, of_masked))
    return torch.where(mask, kept, masked)


def _efficient_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return an expanded mask whose rows are aligned to 8 elements, copied if necessary (`preprocess_mask`)."""
    if mask is None:
        return None
    if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _scratch(like: Tensor, size_bytes: int) -> Tensor:
    """Return a byte tensor for the scratch memory of a kernel. Keep it for as long as the kernel would run."""
    return like.new_empty(size_bytes, dtype=torch.uint8)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash(query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
    """Run the flash kernel with widths padded to a multiple of 8. The scale is computed from the unpadded width."""
    width = query.shape[-1]
    padded = [torch.nn.functional.pad(one, (0, -width % 8)) if width % 8 else one for one in (query, key, value)]
    out = _apply(_Flash, *padded, how)
    return out[..., :width] if width % 8 else out


class _Flash(torch.autograd.Function):
    """Autograd function of the flash kernel: `_flash_attention_forward` and `_flash_attention_backward`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, how = given
        out: Tensor
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, how.dropout_p, how.is_causal, scale=how.scale
        )
        # The fake op returns a random state on the meta device. A kernel allocates it on the GPU, even without dropout.
        random = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        ctx.save_for_backward(query, key, value, out, logsumexp, *random)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp, *random = ctx.saved_tensors
        how: How = ctx.how
        gradient, out = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (gradients[0], out))
        lengths = query.shape[2], key.shape[2]
        grads = aten._scaled_dot_product_flash_attention_backward(
            *(gradient, query, key, value, out, logsumexp, None, None, *lengths),
            *(how.dropout_p, how.is_causal, *random),
            scale=how.scale,
        )
        sizes = flash_backward_bytes(query.shape, key.shape, query.element_size(), how.capability)
        scratch = [_scratch(query, size) for size in sizes]
        del scratch
        return (*grads, None)


def flash_backward_bytes(
    query_shape: Sequence[int], key_shape: Sequence[int], element_bytes: int, capability: Capability
) -> list[int]:
    """Return the scratch sizes of `mha_bwd`: softmax_d, dq_accum, and dk and dv per query head if heads are grouped."""
    batch, heads, length, width = query_shape
    width_up, length_up = _up(width, 32 if width <= 128 else 64), _up(length, 128)
    splits = 1
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = math.ceil(_MULTIPROCESSORS.get(capability, _MOST_MULTIPROCESSORS) / (batch * heads))
    sizes = [batch * heads * length_up * 4, splits * batch * length_up * heads * width_up * 4]
    if key_shape[1] != heads:
        sizes += [batch * key_shape[2] * heads * width * element_bytes] * 2
    return sizes


class _Efficient(torch.autograd.Function):
    """Autograd function of the efficient kernel: `_efficient_attention_forward` and `_efficient_attention_backward`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, bias, how = given
        out: Tensor
        out, logsumexp, *random = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, how.trains, how.dropout_p, how.is_causal, scale=how.scale
        )
        if value.shape[-1] > 128 and query.dtype != torch.float32:
            accumulator = _scratch(query, out.numel() * 4)  # kNeedsOutputAccumulatorBuffer
            del accumulator
        ctx.save_for_backward(query, key, value, bias, out, logsumexp, *random)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, logsumexp, *random = ctx.saved_tensors
        how: How = ctx.how
        gradient = gradients[0].transpose(1, 2).contiguous().transpose(1, 2)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *(gradient, query, key, value, bias, out, logsumexp, *random, how.dropout_p),
            *([True, True, True, bias is not None and ctx.needs_input_grad[3]], how.is_causal),
            scale=how.scale,
        )
        tile = efficient_tile(query.shape[-1], value.shape[-1], query.dtype, how.dropout_p, how.capability)
        if tile.computes_delta:
            delta = query.new_empty(query.shape[:3], dtype=torch.float32)
        else:
            product = (gradient.float() * out.float()).transpose(1, 2)
            delta = product.sum(-1).transpose(1, 2).contiguous()
            del product
        workspace = _scratch(query, efficient_workspace_bytes(query.shape, key.shape, value.shape[-1], tile))
        del delta, workspace
        return (*grads, None)


class Tile(NamedTuple):
    """The variant of the efficient backward kernel, with the parameters in its ``cutlassB.h`` name.

    ``rows`` and ``columns``: size of the tile of scores. ``most_width``: largest width of a head. ``half``: whether the
    dtype is fp16 or bf16. ``architecture``: such as 80 for compute capability 8.0 and newer.
    """

    rows: int
    columns: int
    most_width: int
    half: bool
    architecture: int

    @property
    def keeps_outputs(self) -> bool:
        """True if the kernel keeps its output in registers (``kOutputInRF``), and so needs no output buffer."""
        return self.half and self.most_width <= self.rows

    @property
    def computes_delta(self) -> bool:
        """True if the kernel itself computes delta, the row sums of gradient x output (``kKernelComputesDelta``)."""
        return self.half and (self.keeps_outputs or self.architecture != 70)


def efficient_tile(width: int, value_width: int, dtype: torch.dtype, dropout_p: float, capability: Capability) -> Tile:
    """Return the first kernel of `dispatch_cutlassB` that supports these parameters."""
    number, half, most = capability[0] * 10 + capability[1], dtype in HALF, max(width, value_width)
    architecture = 80 if number >= 80 else 75 if number >= 75 else 70 if number >= 70 else 50
    has_large_shared_memory = number in (70, 80) or 90 <= number < 120

    def tile(rows: int, columns: int, most_width: int) -> Tile:
        return Tile(rows, columns, most_width, half, architecture)

    if most <= 64:
        return tile(64, 64, 32 if most <= 32 else 64)
    if number in (86, 89) and half and most <= 96 and not dropout_p > 0:
        return tile(128, 64, 96)
    most_width = 128 if most <= 128 else 65536
    if not has_large_shared_memory or architecture == 50 or (architecture == 70 and not half):
        return tile(64, 64, most_width)
    return tile(128, 128 if half and architecture == 80 and most <= 128 else 64, most_width)


def efficient_workspace_bytes(
    query_shape: Sequence[int], key_shape: Sequence[int], value_width: int, tile: Tile
) -> int:
    """Return the workspace size of the efficient backward in bytes (`workspace_size`).

    It consists of accumulators for dq, and for dk and dv if they do not fit in registers.
    """
    batch, heads, length, width = query_shape
    splits = -(-key_shape[2] // tile.columns)
    if batch * heads >= 256 and key_shape[2] <= 2 * tile.columns:
        splits = 1
    for_keys = 0
    if tile.half and not tile.keeps_outputs:
        splits = max(1, min(splits, 200 // (batch * heads))) if tile.architecture >= 70 else 1
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            splits = 1
        for_keys = splits * tile.columns * (_up(width, tile.rows) + _up(value_width, tile.rows))
    for_queries = 0
    if tile.architecture >= 70 or tile.half:
        # Each tile of dq has a header of 16 bytes: a lock, a counter and padding.
        blocks = -(-length // tile.rows) * -(-width // tile.columns)
        for_queries = blocks * (16 + tile.rows * tile.columns * 4) // 4
    return batch * heads * _up(for_keys + for_queries, 4) * 4


class _CuDNN(torch.autograd.Function):
    """Autograd function of the cuDNN kernel: `_cudnn_attention_forward` and `_cudnn_attention_backward`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, bias, how = given
        out: Tensor
        out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, how.trains, how.dropout_p, how.is_causal, scale=how.scale
        )
        random = query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)
        ctx.save_for_backward(query, key, value, bias, out, logsumexp if how.trains else None, *random)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, logsumexp, *random = ctx.saved_tensors
        how: How = ctx.how
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *(gradients[0], query, key, value, out, logsumexp, *random, bias, None, None),
            *(query.shape[2], key.shape[2], how.dropout_p, how.is_causal),
            scale=how.scale,
        )
        scratch = _scratch(query, cudnn_backward_bytes(query.shape, key.shape))
        del scratch
        return (*grads, None, None)


def cudnn_backward_bytes(query_shape: Sequence[int], key_shape: Sequence[int]) -> int:
    """Return the workspace bytes of cuDNN's backward: dq in fp32, row sums, and dk and dv if heads are grouped."""
    batch, heads, length, width = query_shape
    size = batch * heads * length * (width + 1) * 4
    return size + (2 * batch * heads * key_shape[2] * width * 2 if key_shape[1] != heads else 0)


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How) -> Tensor:
    """Run `_scaled_dot_product_attention_math`, with CUDA's dropout."""
    dtype = query.dtype
    reduced: bool = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    if dtype in HALF and not reduced:
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(abs(how.scale))
    query = query * (-root if how.scale < 0 else root)
    if how.is_causal:
        kept = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _as_addend(kept, query.dtype)
    if how.enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = _apply(_SafeSoftmax, scores)
    del scores
    if how.dropout_p > 0:
        weights = torch.native_dropout(weights, how.dropout_p, True)[0]
    out = (weights @ value).to(dtype)
    weights.to(dtype)  # the second output, freed at once
    return out


class _SafeSoftmax(torch.autograd.Function):
    """Autograd function that computes `_safe_softmax` and allocates the same temporaries.

    Fully masked rows become zeros.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        masked = scores.eq(-math.inf)
        weights.masked_fill_(masked.all(-1, keepdim=True), 0.0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor]:
        (weights,) = ctx.saved_tensors
        return (aten._softmax_backward_data(gradients[0], weights, -1, weights.dtype),)
