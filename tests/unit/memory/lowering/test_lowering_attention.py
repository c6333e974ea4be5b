"""CUDA's attention on fake tensors: the saved tensors, and the scratch of the backward pass by hand."""

import math
import re
import weakref
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plimsoll.errors import DeviceError
from plimsoll.memory.lowering.attention import (
    cudnn_backward_bytes,
    efficient_tile,
    efficient_workspace_bytes,
    flash_backward_bytes,
    scaled_dot_product_attention,
)
from plimsoll.memory.lowering.autocast import cuda_autocast_lists

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
A100, A10, H100 = (8, 0), (8, 6), (9, 0)
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def inputs(dtype=BF16, heads=4, key_heads=4, length=48, width=64, batch=2, requires_grad=True):
    shapes = (batch, heads, length, width), (batch, key_heads, length, width), (batch, key_heads, length, width)
    # As a model has them: [batch, length, heads, width], transposed.
    return [
        torch.empty(b, s, h, d, dtype=dtype).transpose(1, 2).detach().requires_grad_(requires_grad)
        for b, h, s, d in shapes
    ]


class Births(TorchDispatchMode):
    """A mode that records the sizes of new storages by dtype, and the live bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[torch.dtype, list[int]] = {}
        self.live: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                self.note(one, given)
        return out

    def note(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self.live and key not in given:
            self.live[key] = size
            self.sizes.setdefault(tensor.dtype, []).append(size)
            weakref.finalize(storage, self.live.pop, key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_every_kernel_runs_forward_and_backward_on_fake_tensors(kernel, dtype) -> None:
    ran = 0
    for mask, causal, dropout_p, key_heads, width in product(
        (None, "bool", "float"), (0, 1), (0.0, 0.125), (4, 2), (64, 36)
    ):
        if mask and causal:
            continue
        with FakeTensorMode(), sdpa_kernel(KERNELS[kernel]):
            query, key, value = inputs(dtype, key_heads=key_heads, width=width)
            given = {
                None: None,
                "bool": torch.ones(2, 1, 1, 48, dtype=torch.bool),
                "float": torch.empty(4, 48, 48, dtype=dtype, requires_grad=True),
            }[mask]
            how = {"dropout_p": dropout_p, "is_causal": bool(causal), "enable_gqa": key_heads == 2}
            try:
                out = scaled_dot_product_attention(query, key, value, given, **how, capability=H100)
            except DeviceError:
                continue  # tests of `choose_backend` cover the refusal
            assert (out.shape, out.dtype) == (query.shape, dtype)
            out.sum().backward()
            assert all(one.grad.shape == one.shape and one.grad.dtype == dtype for one in (query, key, value))
            assert mask != "float" or given.grad.shape == given.shape
            ran += 1
    # masks and causal: 4 ways; dropout: 2; heads: 2; widths: 2. Flash takes no mask, cuDNN no learned one nor width 36,
    # the efficient kernel no grouped heads and 36 in fp32 only.
    takes = {"flash": 2 * 2 * 2 * 2, "efficient": 4 * 2 * 1, "cudnn": 3 * 2 * 2, "math": 4 * 2 * 2 * 2}[kernel]
    half_only = kernel in ("flash", "cudnn")
    assert ran == (0 if half_only and dtype == FP32 else takes * (2 if kernel == "efficient" and dtype == FP32 else 1))


def test_flash_keeps_rows_and_random_state_and_its_backward_takes_scratch() -> None:
    with FakeTensorMode():
        query, key, value = inputs(batch=8, heads=12, key_heads=12, length=1024)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, capability=A100)
        saved = out.grad_fn.saved_tensors
        assert [(tuple(one.shape), one.dtype) for one in saved[4:]] == [
            ((8, 12, 1024), FP32),
            ((2,), torch.uint64),
            ((), torch.uint64),
        ]
        gradient = torch.empty_like(out)
        with Births() as births:
            out.backward(gradient)
        assert births.sizes[torch.uint8] == [8 * 12 * 1024 * 4, 8 * 1024 * 12 * 64 * 4] == [393_216, 25_165_824]
        assert births.sizes[BF16] == [12_582_912] * 3  # dq, dk, dv, and no copy of `out` or of its gradient
        assert sorted(births.live.values()) == [12_582_912] * 3


def test_flash_copies_an_output_that_is_laid_out_by_heads() -> None:
    with FakeTensorMode():
        query, key, value = (one.contiguous().detach().requires_grad_() for one in inputs())
        out = scaled_dot_product_attention(query, key, value, capability=A100)
        gradient = torch.empty_like(out)
        with Births() as births:
            out.backward(gradient)
    assert births.sizes[BF16] == [2 * 4 * 48 * 64 * 2] * 5


def test_flash_pads_widths_to_eight() -> None:
    with FakeTensorMode():
        query, key, value = inputs(width=36)
        out = scaled_dot_product_attention(query, key, value, capability=A100)
        assert out.shape == (2, 4, 48, 36)
        assert out._base.shape == (2, 4, 48, 40)


@pytest.mark.parametrize(
    ("query", "key", "expected"),
    [
        ((1, 2, 100, 80), (1, 2, 100, 80), [1 * 2 * 128 * 4, 128 * 2 * 96 * 4]),
        ((1, 2, 100, 160), (1, 2, 100, 160), [1 * 2 * 128 * 4, 128 * 2 * 192 * 4]),  # in steps of 64 above 128
        ((1, 4, 128, 64), (1, 2, 256, 64), [2048, 131_072, 256 * 4 * 64 * 2, 256 * 4 * 64 * 2]),
    ],
)
def test_the_scratch_of_flash(query, key, expected) -> None:
    assert flash_backward_bytes(query, key, 2, A100) == expected


def test_deterministic_flash_takes_sums_for_each_split() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        # 108 multiprocessors and 8 heads: ceil(108 / 8) = 14 splits
        assert flash_backward_bytes((2, 4, 128, 64), (2, 4, 128, 64), 2, A100)[1] == 14 * 2 * 128 * 4 * 64 * 4
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_efficient_kernel_in_fp32_multiplies_output_and_gradient_first() -> None:
    with FakeTensorMode():
        query, key, value = inputs(FP32, batch=8, heads=12, key_heads=12, length=1024)
        out = scaled_dot_product_attention(query, key, value, capability=A10)
        assert out.grad_fn.saved_tensors[5].shape == (8, 12, 1024)
        gradient = torch.empty(8, 1024, 12, 64).transpose(1, 2)
        with Births() as births:
            out.backward(gradient)
        # three gradients, their product, and its sums; then 16 tiles of dq for each of 96 heads, 16 bytes before each
        assert births.sizes[FP32] == [25_165_824] * 4 + [393_216] * 2
        assert births.sizes[torch.uint8] == [96 * 16 * (16 + 64 * 64 * 4)] == [25_190_400]
        assert sorted(births.live.values()) == [25_165_824] * 3


def test_the_efficient_kernel_keeps_no_rows_without_gradients() -> None:
    for requires_grad, rows in ((True, 64), (False, 0)):  # 50 rows are kept as 64, a multiple of 32
        with FakeTensorMode(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), Births() as births:
            query, key, value = inputs(length=50, requires_grad=requires_grad)
            out = scaled_dot_product_attention(query, key, value, capability=A100)
        assert births.sizes.get(FP32, [0]) == [2 * 4 * rows * 4]
        assert out.requires_grad == requires_grad


def test_the_efficient_kernel_sums_wide_values_in_fp32() -> None:
    with FakeTensorMode(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), torch.no_grad():
        given = inputs(width=256)
        with Births() as births:
            scaled_dot_product_attention(*given, capability=A100)
    assert births.sizes[torch.uint8] == [2 * 48 * 4 * 256 * 4]


@pytest.mark.parametrize(
    ("width", "dtype", "dropout_p", "capability", "tile", "size_bytes"),
    [
        (64, BF16, 0.1, A100, (64, 64, 64), 96 * 16 * 16_400),
        # dk and dv stay in registers where the width is at most the rows
        (128, BF16, 0.0, H100, (128, 128, 128), 96 * 8 * (16 + 128 * 128 * 4)),
        (96, FP16, 0.0, A10, (128, 64, 96), 96 * 8 * 2 * (16 + 128 * 64 * 4)),
        # else min(16, 200 // 96) = 2 splits of 64 keys, 128 + 128 wide
        (96, FP16, 0.1, A10, (64, 64, 128), 96 * (2 * 64 * (128 + 128) * 4 + 32 * 16_400)),
        (256, BF16, 0.0, A100, (128, 64, 65536), 96 * (2 * 64 * 512 * 4 + 8 * 4 * (16 + 128 * 64 * 4))),
        (128, FP32, 0.0, A100, (128, 64, 128), 96 * 8 * 2 * (16 + 128 * 64 * 4)),
        (64, FP32, 0.0, (6, 1), (64, 64, 64), 0),
    ],
)
def test_the_workspace_of_the_efficient_kernel(width, dtype, dropout_p, capability, tile, size_bytes) -> None:
    shape = (8, 12, 1024, width)
    chosen = efficient_tile(width, width, dtype, dropout_p, capability)
    assert chosen[:3] == tile
    assert efficient_workspace_bytes(shape, shape, width, chosen) == size_bytes


def test_every_tile_is_one_that_torch_has() -> None:
    header = Path(torch.__file__).parent / "include/ATen/native/transformers/cuda/mem_eff_attention/kernels/cutlassB.h"
    found = re.findall(
        r"cb\(AttentionBackwardKernel<cutlass::arch::Sm(\d+), (?:cutlass::)?(\w+), "
        r"true, (\w+), \w+, (\d+), (\d+), (\d+)>",
        header.read_text(encoding="utf-8"),
    )
    types = {"half_t": FP16, "bfloat16_t": BF16, "float": FP32}
    kernels = {(int(sm), types[kind], drops == "true", *map(int, sizes)) for sm, kind, drops, *sizes in found}
    devices = {(5, 0): 50, (6, 1): 50, (7, 0): 70, (7, 5): 75, A100: 80, A10: 80, (8, 9): 80, H100: 80, (12, 0): 80}
    for (capability, sm), dtype, dropout_p, width in product(
        devices.items(), types.values(), (0.0, 0.1), (8, 32, 64, 72, 96, 128, 160, 512)
    ):
        if dtype != BF16 or sm == 80:
            tile = efficient_tile(width, width, dtype, dropout_p, capability)
            assert (sm, dtype, dropout_p > 0, *tile[:3]) in kernels


def test_a_boolean_mask_becomes_one_of_the_dtype_with_rows_at_multiples_of_eight() -> None:
    for length, width_up in ((48, 48), (50, 56)):
        with FakeTensorMode(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            query, key, value = inputs(length=length)
            mask = torch.ones(2, 1, length, length, dtype=torch.bool)
            out = scaled_dot_product_attention(query, key, value, mask, capability=A100)
            bias = out.grad_fn.saved_tensors[3]
        assert bias.shape == (2, 4, length, length)
        assert bias.untyped_storage().nbytes() == 2 * length * width_up * 2


def test_the_gradient_of_a_mask_is_padded_to_sixteen() -> None:
    with FakeTensorMode():
        query, key, value = inputs(length=40)
        mask = torch.empty(2, 4, 40, 40, dtype=BF16, requires_grad=True)
        out = scaled_dot_product_attention(query, key, value, mask, capability=A100)
        with Births() as births:
            out.sum().backward()
    assert 2 * 4 * 40 * 48 * 2 in births.sizes[BF16]


def test_cudnn_takes_sums_for_dq_and_one_for_each_row() -> None:
    with FakeTensorMode():
        query, key, value = inputs(key_heads=2)
        out = scaled_dot_product_attention(query, key, value, enable_gqa=True, capability=H100)
        assert out.grad_fn.saved_tensors[5].shape == (2, 4, 48, 1)
        with Births() as births:
            out.sum().backward()
    # 2 * 4 * 48 rows of 64 + 1 numbers; dk and dv of 4 heads in bf16
    assert births.sizes[torch.uint8] == [384 * 65 * 4 + 2 * 384 * 64 * 2] == [198_144]
    assert cudnn_backward_bytes((2, 4, 48, 64), (2, 4, 48, 64)) == 384 * 65 * 4


@pytest.mark.parametrize("how", ["plain", "bool", "float", "causal", "grouped", "negative"])
def test_math_gives_what_torchs_own_gives(how) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))
    more: dict = {"enable_gqa": True}
    if how == "bool":
        more["attn_mask"] = torch.rand(5, 5) > 0.5
        more["attn_mask"][2] = False  # a row in which all is masked gives zeros
    if how == "float":
        more["attn_mask"] = torch.randn(2, 1, 1, 5)
    if how == "causal":
        more["is_causal"] = True
    if how == "negative":
        more["scale"] = -0.3
    with sdpa_kernel(SDPBackend.MATH):
        ours = scaled_dot_product_attention(query, key, value, **more, capability=A100)
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, **more)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad(ours, (query, key, value), seed),
        torch.autograd.grad(theirs, (query, key, value), seed),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_math_in_lower_precision_computes_in_fp32_and_keeps_the_scores() -> None:
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
        given = inputs()
        with Births() as births:
            out = scaled_dot_product_attention(*given, dropout_p=0.5, capability=A100)
    scores = 2 * 4 * 48 * 48
    # scores, softmax, dropout; and the copy in bf16, which is freed
    assert births.sizes[FP32].count(scores * 4) == 3
    assert scores * 2 in births.sizes[BF16]
    assert births.sizes[torch.bool].count(scores) == 2  # masked rows, and the mask of dropout
    # Softmax, its result after dropout, and the mask of dropout are saved for backward.
    assert sorted(births.live.values()).count(scores * 4) == 2
    assert sorted(births.live.values()).count(scores) == 1
    assert out.dtype == BF16


def test_under_autocast_the_inputs_are_cast_first() -> None:
    with FakeTensorMode(), cuda_autocast_lists(), torch.autocast("cuda", dtype=BF16):
        query, key, value = inputs(FP32)
        out = scaled_dot_product_attention(query, key, value, capability=A100)
        assert type(out.grad_fn).__name__ == "_FlashBackward"
        masked = scaled_dot_product_attention(query, key, value, torch.zeros(48, 48), capability=A100)
        assert type(masked.grad_fn).__name__ == "_EfficientBackward"
        assert masked.grad_fn.saved_tensors[3].dtype == BF16
    assert out.dtype == BF16
    out.sum().backward()
    assert query.grad.dtype == FP32


def test_the_scale_is_that_of_the_width_before_padding() -> None:
    with FakeTensorMode():
        out = scaled_dot_product_attention(*inputs(width=36), capability=A100)
        base = next(node for node, _ in out.grad_fn.next_functions)
    assert base.how.scale == pytest.approx(1 / math.sqrt(36))
