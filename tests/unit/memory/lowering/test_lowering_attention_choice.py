"""The attention kernel that CUDA picks, by hand from `sdp_utils.cpp` of torch 2.13."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from plimsoll.errors import DeviceError
from plimsoll.memory.lowering.attention_choice import Call, choose_backend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T4, V100, A100, A10, H100, B200, RTX50 = (7, 5), (7, 0), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)


def choose(capability, dtype=BF16, width=64, *, heads=12, key_heads=None, lengths=(128, 128), value_width=None, **more):
    asked = {
        "has_mask": False,
        "mask_requires_grad": False,
        "dropout_p": 0.0,
        "is_causal": False,
        "enable_gqa": False,
        "requires_grad": True,
        **more,
    }
    keys = (8, key_heads or heads, lengths[1])
    shapes = (8, heads, lengths[0], width), (*keys, width), (*keys, value_width or width)
    return choose_backend(Call(*shapes, dtype, capability=capability, **asked))


@pytest.mark.parametrize(
    ("expected", "capability", "dtype", "more"),
    [
        # On Hopper and on data centre Blackwell cuDNN is first, elsewhere flash.
        ("cudnn", H100, BF16, {}),
        ("cudnn", B200, FP16, {"is_causal": True}),
        ("cudnn", (10, 3), BF16, {}),
        ("flash", A100, BF16, {}),
        ("flash", A10, FP16, {"is_causal": True, "dropout_p": 0.1}),
        ("flash", RTX50, BF16, {}),
        ("flash", H100, BF16, {"cudnn_version": 91002}),
        # cuDNN knows dropout in sixteenths, and widths to 128.
        ("flash", H100, BF16, {"dropout_p": 0.1}),
        ("cudnn", H100, BF16, {"dropout_p": 0.125}),
        ("flash", H100, BF16, {"width": 256}),
        ("cudnn", H100, BF16, {"width": 192, "value_width": 128}),
        # A mask is not for flash; a learned one is not for cuDNN either.
        ("efficient", A100, BF16, {"has_mask": True}),
        ("cudnn", H100, BF16, {"has_mask": True}),
        ("efficient", H100, BF16, {"has_mask": True, "mask_requires_grad": True}),
        ("efficient", H100, BF16, {"has_mask": True, "mask_shape": (8, 128, 128)}),
        ("cudnn", H100, BF16, {"has_mask": True, "mask_shape": (8, 1, 1, 128)}),
        # fp32 is for the efficient kernel alone, fp64 for none.
        ("efficient", A100, FP32, {}),
        ("efficient", H100, FP32, {"has_mask": True}),
        ("math", A100, torch.float64, {}),
        # Before 8.0 there is no flash, and no bf16.
        ("efficient", T4, FP16, {}),
        ("efficient", V100, FP32, {}),
        ("efficient", (5, 0), FP16, {}),
        ("math", T4, BF16, {}),
        ("math", (3, 7), FP32, {}),
        # Widths: flash to 256, with limits on small devices; efficient by the alignment of its matrix products.
        ("efficient", A100, BF16, {"width": 264}),
        ("flash", A100, BF16, {"width": 60}),
        ("math", A100, FP32, {"width": 62}),
        ("efficient", V100, FP32, {"width": 62}),
        ("math", V100, FP16, {"width": 60}),
        ("efficient", A10, BF16, {"width": 224}),
        ("flash", A10, BF16, {"width": 224, "requires_grad": False}),
        ("flash", A10, BF16, {"width": 256}),
        ("efficient", RTX50, BF16, {"width": 256, "dropout_p": 0.5}),
        ("flash", A100, BF16, {"width": 256, "dropout_p": 0.5}),
        ("efficient", A100, BF16, {"value_width": 128}),
        # Lengths: causal flash is for squares.
        ("efficient", A100, BF16, {"lengths": (64, 128), "is_causal": True}),
        ("flash", A100, BF16, {"lengths": (64, 128)}),
        ("math", A100, BF16, {"lengths": (0, 128)}),
        ("flash", H100, BF16, {"lengths": (128, 1)}),
        # Grouped heads: not in the efficient kernel.
        ("flash", A100, BF16, {"key_heads": 4, "enable_gqa": True}),
        ("cudnn", H100, BF16, {"key_heads": 4, "enable_gqa": True, "has_mask": True}),
        ("math", A100, BF16, {"key_heads": 4, "enable_gqa": True, "has_mask": True}),
        ("math", A100, FP32, {"key_heads": 4, "enable_gqa": True}),
        ("efficient", A100, FP32, {"enable_gqa": True}),
        ("math", A100, BF16, {"key_heads": 5, "enable_gqa": True}),
        ("math", A100, BF16, {"key_heads": 4}),
        ("math", A100, BF16, {"last_strides_are_one": False}),
    ],
)
def test_the_choice(expected, capability, dtype, more) -> None:
    assert choose(capability, dtype, **more) == expected


def test_other_than_four_dimensions_are_for_math() -> None:
    shape = (8, 128, 64)
    call = Call(shape, shape, shape, BF16, False, False, 0.0, False, False, True, A100)
    assert choose_backend(call) == "math"


def test_flags_and_order_of_the_user_are_kept(monkeypatch) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(A100) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose(H100) == "efficient"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        assert choose(H100) == "flash"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(H100) == "flash"


def test_deterministic_algorithms_exclude_cudnn() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(H100) == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert choose(H100) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


def test_where_nothing_is_left_it_says_what_to_allow() -> None:
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(DeviceError, match=r"capability 8\.0, and `math` is disabled: allow SDPBackend\.MATH"),
    ):
        choose(A100, FP32)


def test_a_torch_that_does_not_tell_its_order_is_refused(monkeypatch) -> None:
    monkeypatch.delattr(torch._C, "_get_sdp_priority_order")
    with pytest.raises(DeviceError, match=r"no _get_sdp_priority_order.*: use torch 2\.11"):
        choose(A100)
