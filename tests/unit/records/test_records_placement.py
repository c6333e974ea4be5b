"""The properties of a plan for inference, in whole numbers."""

from placement_records import impossible_plan, linked_plan, resident_plan, streamed_plan
from prediction_records import MIB


def test_bytes_are_counted_by_place():
    plan = streamed_plan()
    assert plan.num_bytes == 710 * MIB
    assert plan.resident_bytes == plan.bytes_in("device") == 210 * MIB
    assert plan.bytes_in("disk") == 500 * MIB
    assert plan.bytes_in("host") == 0


def test_names_are_told_by_place():
    plan = streamed_plan()
    assert plan.names_in("device") == {"model.layers.2", "model.layers.5", "the rest"}
    assert plan.names_in("device", "disk") == {part.name for part in plan.parts}


def test_the_rate_is_that_of_a_pass():
    assert streamed_plan().rows_per_second == 4.0


def test_what_takes_longer_is_the_limit():
    assert streamed_plan().limited_by == "compute"
    assert streamed_plan(read_seconds=9.0).limited_by == "disk"
    assert linked_plan().limited_by == "link"
    assert resident_plan().limited_by == "compute"


def test_a_plan_fits_that_needs_no_larger_budget():
    assert streamed_plan().fits
    assert not impossible_plan().fits
