"""The allocator's numbers: torch's defaults, and divisions by the size of a request."""

import pytest
from pydantic import ValidationError

from plimsoll.records.allocator import MIB, AllocatorRules


def test_the_defaults_are_those_of_torch():
    rules = AllocatorRules()
    sizes = (rules.rounding_bytes, rules.small_bytes, rules.small_segment_bytes, rules.large_segment_bytes)
    assert sizes == (512, 1048576, 2097152, 20971520)
    assert (rules.min_large_bytes, rules.round_large_bytes, rules.expandable_segments) == (10485760, 2097152, False)


@pytest.mark.parametrize(
    ("num_bytes", "divisions"),
    [(1, 0), (2 * MIB - 1, 0), (2 * MIB, 1), (4 * MIB - 1, 1), (1 << 35, 15), (1 << 40, 15)],
)
def test_divisions_by_size(num_bytes: int, divisions: int):
    assert AllocatorRules(roundup_power2_divisions=tuple(range(16))).divisions(num_bytes) == divisions
    assert AllocatorRules(roundup_power2_divisions=4).divisions(num_bytes) == 4


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValidationError):
        AllocatorRules(max_split_size=5)
