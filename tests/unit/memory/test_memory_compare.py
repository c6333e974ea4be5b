"""Comparison of two traces: paired ops, the peaks, the first difference, and calibration."""

import pytest
import torch
from memory_traces import Storage, trace_of

from plimsoll.memory.compare import align, calibrate, compare
from plimsoll.memory.lowering.base import Scratch
from plimsoll.memory.recorder import Recorder
from plimsoll.records.comparison import Block, Calibration, Comparison, Counters

OPS = ["a", "b", "c"]
PREDICTED = trace_of(OPS, [Storage(100, born=0), Storage(20, born=1, died=2, shape="float32[5]")])
MEASURED = trace_of(
    OPS, [Storage(100, born=0), Storage(60, born=1, died=2, shape="float32[15]"), Storage(40, born=2, died=2)]
)


def test_equal_traces_have_no_difference():
    comparison = compare(MEASURED, MEASURED)
    assert comparison.is_equal
    assert (comparison.num_differing_ops, comparison.first, comparison.groups) == (0, None, ())
    assert (comparison.relative_error, comparison.num_ops) == (0.0, 3)


def test_the_peaks_with_their_parts_and_moments():
    comparison = compare(PREDICTED, MEASURED)
    assert (comparison.predicted.peak_bytes, comparison.measured.peak_bytes) == (120, 200)
    assert (comparison.error_bytes, comparison.relative_error) == (80, 0.4)
    assert comparison.measured.parts == {"activations": 200}
    assert (comparison.predicted.moment.op, comparison.measured.moment.op) == ("b", "c")


def test_the_first_difference_says_where_and_what():
    first = compare(PREDICTED, MEASURED).first
    assert first is not None
    assert (first.row, first.moment.op, first.moment.module, first.is_predicted) == (1, "b", "layer", True)
    assert first.only_predicted == (Block(num_bytes=20, shape="float32[5]"),)
    assert first.only_measured == (Block(num_bytes=60, shape="float32[15]"),)
    assert first.freed_only_measured == ()


def test_the_groups_add_up_to_the_difference_of_the_peaks():
    groups = compare(PREDICTED, MEASURED).groups
    assert [(group.op, group.difference_bytes) for group in groups] == [("b", 40), ("c", 40)]
    assert sum(group.difference_bytes for group in groups) == 80


def test_an_op_in_one_trace_only_is_a_difference_if_it_allocates():
    longer = trace_of(["a", "new", "b", "c"], [Storage(100, born=0), Storage(7, born=1), Storage(20, born=2, died=3)])
    shorter = trace_of(["a", "b", "c"], [Storage(100, born=0), Storage(20, born=1, died=2)])
    comparison = compare(shorter, longer)
    assert comparison.first is not None
    assert (comparison.num_differing_ops, comparison.first.moment.op) == (1, "new")
    assert (comparison.first.is_predicted, comparison.first.is_measured) == (False, True)


def test_what_kernels_take_while_they_run_is_left_out():
    ones = torch.ones(4)

    def recorded(*sizes: int) -> Recorder:
        with Recorder(scratch_bytes=lambda op, args, kwargs: Scratch(sizes)) as recorder:
            ones.exp()
        return recorder

    predicted = recorded(1000).trace("predicted", "cpu")
    assert max(predicted.storages.num_bytes) == 1000
    assert compare(predicted, recorded().trace("measured", "cpu")).num_differing_ops == 0


def test_a_comparison_survives_its_file(tmp_path):
    comparison = compare(PREDICTED, MEASURED)
    comparison.save(tmp_path / "comparison.json")
    assert Comparison.load(tmp_path / "comparison.json") == comparison


def test_a_run_teaches_a_ratio_and_with_counters_what_lies_around_it():
    counters = Counters(device="cpu", baseline_bytes=1000, peak_bytes=1500, reserved_bytes=0)
    target = calibrate(Calibration(), compare(PREDICTED, MEASURED, counters)).targets["cpu"]
    assert target.live_ratio is not None
    assert (target.live_ratio.num_runs, target.live_ratio.mean) == (1, pytest.approx(200 / 120))
    assert target.baseline_bytes is not None
    assert target.beyond_ratio is not None
    assert (target.baseline_bytes.mean, target.beyond_ratio.mean) == (1000, 2.5)


def test_more_runs_give_a_mean_and_a_range(tmp_path):
    once = calibrate(Calibration(), compare(PREDICTED, PREDICTED))
    twice = calibrate(once, compare(PREDICTED, trace_of(OPS, [Storage(180, born=0)])))
    learned = twice.targets["cpu"].live_ratio
    assert learned is not None
    assert (learned.num_runs, learned.mean, learned.low, learned.high) == (2, 1.25, 1.0, 1.5)
    assert twice.targets["cpu"].baseline_bytes is None
    twice.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == twice


def test_a_run_without_memory_teaches_nothing():
    empty = trace_of(OPS, [])
    assert calibrate(Calibration(), compare(empty, empty)) == Calibration()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("abc", "abc", [(0, 0), (1, 1), (2, 2)]),
        ("", "ab", [(None, 0), (None, 1)]),
        ("ab", "", [(0, None), (1, None)]),
        ("abcdef", "abXcdef", [(0, 0), (1, 1), (None, 2), (2, 3), (3, 4), (4, 5), (5, 6)]),
        ("abXYcdef", "abcdef", [(0, 0), (1, 1), (2, None), (3, None), (4, 2), (5, 3), (6, 4), (7, 5)]),
        ("aXbcdYe", "abcdZe", [(0, 0), (1, None), (2, 1), (3, 2), (4, 3), (5, None), (None, 4), (6, 5)]),
        ("ab", "cd", [(0, None), (1, None), (None, 0), (None, 1)]),
        ("aa", "aaa", [(None, 0), (0, 1), (1, 2)]),
    ],
)
def test_what_is_alike_is_paired(one: str, other: str, expected: list):
    pairs = list(align(trace_of(list(one), []), trace_of(list(other), [])))
    assert sorted(pairs, key=str) == sorted(expected, key=str)
    assert [row for row, _ in pairs if row is not None] == list(range(len(one)))
    assert [row for _, row in pairs if row is not None] == list(range(len(other)))


def test_ops_of_another_phase_are_never_paired():
    pairs = list(align(trace_of(["a"], [], phase="forward"), trace_of(["a"], [], phase="backward")))
    assert pairs == [(0, None), (None, 0)]


def test_a_long_stretch_that_only_one_trace_has_ends_the_pairing_of_its_part():
    one, other = ["a", "b", "c", "d", "end"], ["a", *["x"] * 600, "b", "c", "d", "other end"]
    pairs = list(align(trace_of(one, []), trace_of(other, [])))
    assert [pair for pair in pairs if None not in pair] == [(0, 0)]
