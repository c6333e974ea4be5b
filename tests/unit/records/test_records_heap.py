"""The heap's settings are those of `plimsoll.device.heap`, and a fresh process's are glibc's."""

import pytest
from pydantic import ValidationError

from plimsoll.device import heap
from plimsoll.records.heap import DEFAULT_HEAP, FAST_HEAP, FRESH_HEAP, TIGHT_HEAP, HeapRules


def test_the_thresholds_are_those_that_are_set():
    assert FAST_HEAP.mmap_threshold_bytes == heap.FAST_BYTES
    assert TIGHT_HEAP.mmap_threshold_bytes == heap.TIGHT_BYTES
    assert not FAST_HEAP.is_dynamic
    assert not TIGHT_HEAP.is_dynamic


def test_setting_the_mapping_threshold_leaves_the_trim_threshold_of_the_imports():
    assert FRESH_HEAP.trim_threshold_bytes == FRESH_HEAP.mmap_threshold_bytes == 128 << 10
    for rules in (DEFAULT_HEAP, FAST_HEAP, TIGHT_HEAP):
        assert rules.trim_threshold_bytes == 2 * DEFAULT_HEAP.mmap_threshold_bytes


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValidationError):
        HeapRules(mmap_threshold_bytes=-1)
