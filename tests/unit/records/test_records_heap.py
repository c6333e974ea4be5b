"""The heap's settings: glibc's own numbers, and the numbers that Plimsoll sets."""

import pytest
from pydantic import ValidationError

from plimsoll.device.cpu.heap import FAST_BYTES, TIGHT_BYTES, USUAL_BYTES, top_bytes
from plimsoll.records.allocator import DEFAULT_HEAP, FAST_HEAP, FRESH_HEAP, KEPT_HEAP, TIGHT_HEAP, HeapRules


def test_a_fresh_heap_is_that_of_mallopt_3():
    rules = FRESH_HEAP.model_dump()
    assert rules == {
        "mmap_threshold_bytes": 131072,
        "is_dynamic": True,
        "trim_threshold_bytes": 131072,
        "top_pad_bytes": 131072,
        "num_cached_per_size": 7,
        "page_bytes": 4096,
        "alignment_bytes": 64,
        "build_threshold_bytes": None,
        "trims_after_steps": False,
    }


def test_thresholds_that_were_raised_are_the_block_and_twice_the_block():
    assert DEFAULT_HEAP.is_dynamic
    assert DEFAULT_HEAP.trim_threshold_bytes == 2 * DEFAULT_HEAP.mmap_threshold_bytes == 3850240


def test_the_heaps_that_are_set_have_the_thresholds_that_the_device_sets():
    assert (FAST_HEAP.mmap_threshold_bytes, TIGHT_HEAP.mmap_threshold_bytes) == (FAST_BYTES, TIGHT_BYTES)
    assert not FAST_HEAP.is_dynamic
    assert not TIGHT_HEAP.is_dynamic
    assert top_bytes(FAST_BYTES) == FAST_HEAP.trim_threshold_bytes
    assert top_bytes(USUAL_BYTES) == 2 * USUAL_BYTES
    assert FAST_HEAP.trim_threshold_bytes == TIGHT_HEAP.trim_threshold_bytes == DEFAULT_HEAP.trim_threshold_bytes


def test_only_a_heap_that_neither_maps_nor_trims_gives_nothing_back():
    assert not KEPT_HEAP.gives_back
    assert KEPT_HEAP.model_copy(update={"trims_after_steps": True}).gives_back
    assert FAST_HEAP.gives_back


@pytest.mark.parametrize("rules", [FRESH_HEAP, DEFAULT_HEAP, FAST_HEAP, TIGHT_HEAP, KEPT_HEAP])
def test_they_are_read_back_as_they_were_written(rules: HeapRules):
    assert HeapRules.model_validate_json(rules.model_dump_json()) == rules


@pytest.mark.parametrize(
    "wrong", [{"page_bytes": 0}, {"alignment_bytes": 16}, {"mmap_threshold_bytes": -1}, {"mmap_bytes": 1}]
)
def test_numbers_that_no_heap_has_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValidationError):
        HeapRules.model_validate(wrong)
