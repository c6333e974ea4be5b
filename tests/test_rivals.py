"""The figures in comparisons with other tools, computed by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "rivals")]

import streams  # noqa: E402

import _rivals  # noqa: E402
import rivals_prediction  # noqa: E402
import rivals_streaming  # noqa: E402
from rivals_prediction import Pair  # noqa: E402


def test_errors_and_verdicts_of_answers():
    said = [75, 95, 100, 130, None]
    found = rivals_prediction.figures_of([Pair(str(value), 100, value, [100, 125]) for value in said])
    assert found == {
        "n": 5,
        "answered": 4,
        "median": 0.15,  # of 0.25, 0.05, 0 and 0.3
        "by_round": [0.15, 0.22],  # against 125: 0.4, 0.24, 0.2 and 0.04
        "p90": 0.3,
        "worst": 0.3,
        "false_fits_at_0.8": 0.25,
        "false_fits_below_1": 0.5,
        "false_refusals_at_1.2": 0.25,
    }


def test_a_tool_without_an_answer_has_no_error():
    found = rivals_prediction.figures_of([Pair("a", 100, None)])
    assert rivals_prediction.cells(found) == ["0 of 1", "", "", "", "", "", ""]


def test_a_range_is_judged_with_the_base_that_was_measured():
    answers = [{"bytes": 100, "low_bytes": 90, "high_bytes": 110, "context_bytes": 30}, {"bytes": 50}]
    found = rivals_prediction.ranges_of(answers, ["a", "b"], {"a": 20, "b": 20}, {"a": [101, 102, 99], "b": [1]})
    # 80 to 100 for a peak of 101
    assert found == {"inside": 0.0, "half_width": 0.1, "false_fits_below_1": 1.0, "false_refusals_at_1.2": 0.0}


def test_lines_that_are_missing_and_that_come_twice():
    seen = streams.Seen(4)
    for lines in (["0 a", "2 b"], ["2 b", {"text": "3 é"}]):
        batch = streams.collate(lines)
        seen.take(batch)
    assert bytes(batch["bytes"]).decode() == "2 b\n3 é"
    assert seen.figures() == {"lines": 4, "batches": 2, "missing": 1, "repeated": 1}
    assert rivals_streaming.times_text(1, 1) == "1 missing, 1 twice"


def test_the_lines_of_a_text_are_numbered_over_the_files(tmp_path):
    text = tmp_path / "given"
    text.write_text("".join(f"line {number}\n" for number in range(20)))
    paths, num_lines = rivals_streaming.write_files(text, tmp_path / "one")
    assert (num_lines, len(paths)) == (20, rivals_streaming.NUM_FILES)
    lines = [line for path in paths for line in streams.lines_of(str(path))]
    assert lines == [f"{number} line {number}" for number in range(20)]
    paths, num_lines = rivals_streaming.write_files(text, tmp_path / "joined", 6)
    lines = [line for path in paths for line in streams.lines_of(str(path))]
    assert (num_lines, lines[1]) == (3, "1 line 6 line 7 line 8 line 9 line 10 line 11")


def test_all_stores_of_this_environment_give_each_line_once(tmp_path):
    text = tmp_path / "given"
    text.write_text("some words\n" * 3000)
    paths, num_lines = rivals_streaming.write_files(text, tmp_path / "one")
    for name in ("plimsoll", "list of str"):
        store, seen = streams.STORES[name](tmp_path / "work", [str(path) for path in paths]), streams.Seen(num_lines)
        store.open(num_workers=0)
        for batch in store.batches():
            seen.take(batch)
        assert seen.figures() == {"lines": 3000, "batches": 12, "missing": 0, "repeated": 0}


def test_spreads_and_ratios_are_by_round():
    one, two = ({"rounds": [{"x": value} for value in values]} for values in ((1, 2, 4), (3, 2, 2)))
    assert rivals_streaming.spread(one, "x") == "2 (1 - 4)"
    assert rivals_streaming.spread({"rounds": [{"x": 0.001}]}, "x") == "0"
    assert rivals_streaming.ratio(one, two, "x") == "1.00 (0.50 - 3.00)"


def test_an_environment_that_is_not_described_is_refused():
    with pytest.raises(ValueError, match=r"no rivals/nothing\.txt"):
        _rivals.python_of("nothing")
