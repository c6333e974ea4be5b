"""Choice of the kernel that CUDA runs for `scaled_dot_product_attention`.

`choose_backend` follows ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and the checks in ``sdp_utils_cpp.h``
of torch 2.13. It uses the flags and the order set by `torch.nn.attention.sdpa_kernel` and `torch.backends.cuda`. cuDNN
is first on compute capabilities 9.0, 10.0 and 10.3 if it is version 9.15.1 or newer and TORCH_CUDNN_SDPA_DEPRIORITIZED
is not set. Otherwise it is last. The efficient kernel does not support grouped heads.

Does NOT cover nested tensors, ROCm, FlashAttention 3, and builds of torch that lack a library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from plimsoll.errors import DeviceError

Backend = Literal["flash", "efficient", "cudnn", "math"]
Capability = tuple[int, int]

HALF = (torch.float16, torch.bfloat16)
_NAMES: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # at::SDPBackend
_DEFAULT_ORDER: list[Backend] = ["flash", "efficient", "math", "cudnn"]
_CUDNN_VERSION = 91900  # in the wheels of torch 2.13


class Call(NamedTuple):
    """The inputs on which the choice of a kernel depends.

    Attributes:
        query_shape: (batch, heads, length, width). Only the `math` kernel supports other numbers of dimensions.
        key_shape: as `query_shape`.
        value_shape: as `query_shape`.
        dtype: dtype of query, key and value.
        has_mask: whether an explicit `attn_mask` is given.
        mask_requires_grad: whether the mask requires a gradient.
        dropout_p: as given to torch.
        is_causal: as given to torch.
        enable_gqa: as given to torch.
        requires_grad: whether query, key or value requires a gradient, and gradients are enabled.
        capability: compute capability, as from `torch.cuda.get_device_capability`.
        mask_shape: shape of the mask; ``None`` for a shape that every kernel supports.
        last_strides_are_one: whether the last dimension of every input is dense.
        cudnn_version: as from `torch.backends.cudnn.version`.
    """

    query_shape: Sequence[int]
    key_shape: Sequence[int]
    value_shape: Sequence[int]
    dtype: torch.dtype
    has_mask: bool
    mask_requires_grad: bool
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    requires_grad: bool
    capability: Capability
    mask_shape: Sequence[int] | None = None
    last_strides_are_one: bool = True
    cudnn_version: int = _CUDNN_VERSION


def choose_backend(call: Call) -> Backend:
    """Return the kernel that CUDA selects.

    Raises:
        DeviceError: if no enabled kernel supports the call.
    """
    enabled: Any = torch.backends.cuda
    usable: dict[Backend, Callable[[], bool]] = {
        "flash": lambda: enabled.flash_sdp_enabled() and _flash_can(call),
        "efficient": lambda: enabled.mem_efficient_sdp_enabled() and _efficient_can(call),
        "cudnn": lambda: enabled.cudnn_sdp_enabled() and _cudnn_can(call),
        "math": enabled.math_sdp_enabled,
    }
    for backend in _order(call):
        if usable[backend]():
            return backend
    major, minor = call.capability
    raise DeviceError(
        f"attention: no enabled kernel supports query {list(call.query_shape)} and key {list(call.key_shape)} of "
        f"{call.dtype} on a device of capability {major}.{minor}, and `math` is disabled: allow SDPBackend.MATH"
    )


def _order(call: Call) -> list[Backend]:
    """Return the order of kernels (`priority_order` and `check_prefer_cudnn_attention`)."""
    # Private, and the only way to read the order set by sdpa_kernel(..., set_priority=True).
    if (asked := getattr(torch._C, "_get_sdp_priority_order", None)) is None:
        raise DeviceError(
            f"attention: torch._C of torch {torch.__version__} has no _get_sdp_priority_order, which returns "
            "the order of the kernels: use torch 2.11 to 2.13"
        )
    order = [_NAMES[number] for number in asked() if number in _NAMES]
    major, minor = call.capability
    wanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if order == _DEFAULT_ORDER and wanted and major in (9, 10) and minor in (0, 3) and call.cudnn_version > 91500:
        return ["cudnn", "flash", "efficient", "math"]
    return order


def _is_dense(call: Call) -> bool:
    shapes = call.query_shape, call.key_shape, call.value_shape
    return all(len(shape) == 4 for shape in shapes) and 0 not in (shapes[0][-2], shapes[1][-2])


def _heads_fit(call: Call, grouped: bool, same_key_and_value: bool = True) -> bool:
    """Return whether batch sizes and numbers of heads match (`check_batch_size_and_num_heads_dense`)."""
    (query_batch, query_heads), (key_batch, key_heads), (value_batch, value_heads) = (
        shape[:2] for shape in (call.query_shape, call.key_shape, call.value_shape)
    )
    if not query_batch == key_batch == value_batch:
        return False
    if call.enable_gqa and grouped:
        same = key_heads == value_heads or not same_key_and_value
        return same and query_heads % key_heads == 0 and query_heads % value_heads == 0
    return query_heads == key_heads == value_heads


def _flash_can(call: Call) -> bool:
    width = call.query_shape[-1]
    return (
        _is_dense(call)
        and not call.has_mask
        and width == call.key_shape[-1] == call.value_shape[-1]
        and width <= 256
        and (8, 0) <= call.capability <= (12, 1)
        and _flash_trains(call, width)
        and (not call.is_causal or call.query_shape[-2] == call.key_shape[-2])
        and call.dtype in HALF
        and _heads_fit(call, grouped=True)
        and (call.last_strides_are_one or width == 1)
    )


def _flash_trains(call: Call, width: int) -> bool:
    small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    return not (call.requires_grad and small) or width <= 192 or (not call.dropout_p > 0 and width > 224)


def _efficient_can(call: Call) -> bool:
    dtypes = (torch.float32, *HALF) if call.capability >= (8, 0) else (torch.float32, torch.float16)
    width, value_width = call.query_shape[-1], call.value_shape[-1]
    multiple = _gemm_alignment(call)
    return (
        _is_dense(call)
        and (5, 0) <= call.capability <= (12, 1)
        and width == call.key_shape[-1]
        and width % multiple == 0 < width
        and value_width % multiple == 0 < value_width
        and call.last_strides_are_one
        and _heads_fit(call, grouped=False)
        and call.dtype in dtypes
    )


def _gemm_alignment(call: Call) -> int:
    """Return the alignment of rows in elements (`minimum_gemm_alignment`)."""
    half = call.dtype in HALF
    if call.capability >= (8, 0):
        return 8 if half else 4
    return 8 if half and call.capability >= (7, 0) else 1


def _cudnn_can(call: Call) -> bool:
    if not _is_dense(call) or call.dtype not in HALF or not (8, 0) <= call.capability <= (12, 1):
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    dropout_works = not (call.dropout_p > 0 and 91100 < call.cudnn_version < 91400)
    return (
        dropout_works
        and (call.dropout_p * 16).is_integer()
        and _mask_suits_cudnn(call)
        and call.last_strides_are_one
        and _heads_fit(call, grouped=True, same_key_and_value=False)
        and _cudnn_takes_shapes(call)
    )


def _mask_suits_cudnn(call: Call) -> bool:
    """Return whether cuDNN supports the mask (`check_attn_mask_shape`)."""
    if not call.has_mask or call.mask_requires_grad:
        return not call.has_mask
    batch, heads, length, _ = call.query_shape
    whole = (batch, heads, length, call.key_shape[2])
    shape = tuple(whole if call.mask_shape is None else call.mask_shape)
    return len(shape) in (2, 4) and all(own in (1, full) for own, full in zip(shape, whole[-len(shape) :], strict=True))


def _cudnn_takes_shapes(call: Call) -> bool:
    """Return whether cuDNN supports the shapes (`check_cudnn_tensor_shapes`)."""
    width, value_width = call.query_shape[3], call.value_shape[3]
    latest = call.capability == (9, 0) or call.capability[0] == 10
    limit = 192 if latest and (width, value_width) == (192, 128) and call.cudnn_version >= 91100 else 128
    return (
        max(call.query_shape[:2]) <= 65535
        and max(width, value_width) <= limit
        and width % 8 == 0 == value_width % 8
        and call.key_shape[2] != 1
        and not (call.dropout_p != 0 and call.query_shape[2] == 1)
    )
