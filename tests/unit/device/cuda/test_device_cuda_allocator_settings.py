"""The conditions under which segments may grow, and settings that torch accepts."""

import pytest

from plimsoll.device.cuda import allocator_settings


@pytest.mark.parametrize(
    ("environment", "platform", "reason"),
    [
        ({}, "linux", None),
        ({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}, "linux", None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "linux", None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb: 128"}, "linux", "sets max_split_size_mb:128, and with expand"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "linux", "sets expandable_segments:False already"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "linux", "another allocator"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "linux", "there are no segments"),
        ({}, "win32", "no expandable segments on win32"),
    ],
)
def test_what_clashes_is_said(environment, platform, reason):
    found = allocator_settings.clash(environment, platform)
    assert found == reason or reason in found


def test_the_first_variable_counts_alone():
    both = {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:8", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert allocator_settings.text_of(both) == "roundup_power2_divisions:8"
    assert allocator_settings.clash(both, "linux") is None


def test_torch_takes_the_settings_and_says_what_is_wrong_with_others():
    allocator_settings.set_up("expandable_segments:True")
    allocator_settings.set_up("expandable_segments:False")
    with pytest.raises(ValueError, match="power of 2"):
        allocator_settings.set_up("roundup_power2_divisions:3")


@pytest.mark.gpu
def test_segments_that_grow_fill_the_holes_between_blocks():
    import torch

    def reserved_bytes(grows):
        torch.cuda.empty_cache()
        allocator_settings.set_up(f"expandable_segments:{grows}")
        blocks = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(32)]
        del blocks[::2]
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
        reserved = torch.cuda.memory_reserved()
        blocks.clear()
        return reserved

    assert reserved_bytes(True) < reserved_bytes(False)
    allocator_settings.set_up("expandable_segments:False")
