"""The text of PYTORCH_CUDA_ALLOC_CONF becomes allocator rules, or an error that names its fault."""

import pytest

from plimsoll.errors import InputError
from plimsoll.memory.allocator.options import rules_from_text
from plimsoll.records.allocator import MIB, AllocatorRules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", AllocatorRules()),
        ("backend:native", AllocatorRules()),
        ("expandable_segments:True", AllocatorRules(expandable_segments=True)),
        (
            " expandable_segments : True , max_split_size_mb:128",
            AllocatorRules(expandable_segments=True, max_split_bytes=128 * MIB),
        ),
        (
            "large_segment_size_mb:40,max_split_size_mb:40",
            AllocatorRules(
                large_segment_bytes=40 * MIB, max_split_bytes=40 * MIB, max_non_split_rounding_bytes=40 * MIB
            ),
        ),
        ("max_non_split_rounding_mb:64", AllocatorRules(max_non_split_rounding_bytes=64 * MIB)),
        ("garbage_collection_threshold:0.8", AllocatorRules(garbage_collection_threshold=0.8)),
        ("per_process_memory_fraction:1", AllocatorRules(process_share=1.0)),
        ("roundup_power2_divisions:4", AllocatorRules(roundup_power2_divisions=4)),
        (
            "roundup_power2_divisions:[4:8,16:2,>:1]",
            AllocatorRules(roundup_power2_divisions=(8, 8, 8, 0, 2, *[1] * 11)),
        ),
        ("pinned_max_round_threshold_mb:128", AllocatorRules()),
        ("pinned_max_round_threshold_mb:128,pinned_max_cached_size_mb:64", AllocatorRules()),
        ("pinned_use_background_threads:True,throw_on_cudamalloc_oom:True", AllocatorRules()),
    ],
)
def test_texts(text: str, rules: AllocatorRules):
    assert rules_from_text(text) == rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("expandable:True", "unknown key 'expandable': use one of backend, expandable_segments"),
        ("expandable_segments:true", "expandable_segments is 'true': give True or False"),
        ("expandable_segments", "from 'expandable_segments' on: give key:value pairs"),
        ("expandable_segments=True", "give key:value pairs"),
        ("max_split_size_mb:10", "max_split_size_mb is '10': give a whole number of MiB from 20 on"),
        ("max_split_size_mb:128MiB", "is '128MiB': give a whole number of MiB"),
        ("large_segment_size_mb:10", "give a whole number of MiB from 11 on"),
        ("large_segment_size_mb:40,max_split_size_mb:39", "give a whole number of MiB from 40 on"),
        ("garbage_collection_threshold:1.0", "is '1.0': give a number between 0 and 1"),
        ("garbage_collection_threshold:lots", "is 'lots': give a number"),
        ("roundup_power2_divisions:3", "'3' is not a power of two"),
        ("roundup_power2_divisions:[256:1,512]", "'' is not a power of two"),
        ("backend:cudaMallocAsync", "choose the backend 'cudaMallocAsync', whose memory cannot be predicted: use"),
    ],
)
def test_texts_that_torch_or_the_simulator_refuses(text: str, said: str):
    with pytest.raises(InputError) as caught:
        rules_from_text(text)
    assert said in str(caught.value)
