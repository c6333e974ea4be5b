"""The sheets of a plan for inference; golden files hold the whole screens."""

from __future__ import annotations

import pytest

from placement_records import block, impossible_plan, linked_plan, resident_plan, streamed_plan
from plimsoll.records.plan import Duration
from plimsoll.report import placement_sheets
from prediction_records import MIB, estimate


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (streamed_plan(), "fits"),
        (streamed_plan(peak=estimate(990, 50)), "probably fits"),
        (impossible_plan(), "impossible"),
    ],
)
def test_the_verdict_looks_at_the_range(plan, word):
    assert placement_sheets.verdict(plan) == word
    assert placement_sheets.headline(plan).lower().startswith(word)


def test_what_needs_too_much_says_what_would_do():
    assert "give --budget 516MiB, or shorter rows" in placement_sheets.headline(impossible_plan())


def test_a_host_that_is_too_small_is_named():
    plan = linked_plan(smallest_budget_bytes=516 * MIB, host_free_bytes=300 * MIB)
    assert placement_sheets.sentences(plan)[-1] == (
        "Host memory can hold 300.0 MiB of weights; the others must stay on the device, or be read from disk: give "
        "--device cpu."
    )
    assert len(placement_sheets.sentences(linked_plan(host_free_bytes=900 * MIB))) == 2


def test_the_places_are_told_by_their_bytes():
    assert placement_sheets.sentences(streamed_plan())[0] == (
        "Of 710.0 MiB of weights, 210.0 MiB is in memory and 500.0 MiB is on disk."
    )
    assert placement_sheets.sentences(resident_plan()) == ("All 710.0 MiB of the weights stay in memory.",)
    assert "in host memory" in placement_sheets.sentences(linked_plan())[0]


def test_a_pass_says_what_it_waits_for():
    assert placement_sheets.sentences(streamed_plan())[1].endswith(
        "at 125.0 MiB/s (measured) in 4.0 s while it computes for 8.0 s; bottleneck: compute."
    )
    assert placement_sheets.sentences(streamed_plan(read_seconds=9.0))[1].endswith("bottleneck: disk.")
    assert placement_sheets.sentences(linked_plan())[1].endswith("bottleneck: link.")
    cached = placement_sheets.sentences(streamed_plan(read_bytes=0, read_seconds=0.0, cached_bytes=470 * MIB))
    assert "only the first pass reads them" in cached[1]


def test_blocks_that_lie_alike_are_one_row():
    rows = placement_sheets.part_sheet(streamed_plan()).rows
    assert [row[0] for row in rows] == [
        "model.layers.*: 0-1, 3-4",
        "model.layers.*: 2, 5",
        "output layer",
        "embeddings",
        "the rest",
    ]
    assert rows[0][1:] == ("on disk, streamed", "4", "400.0 MiB")
    assert rows[3][1] == "on disk, read row by row"


def test_one_block_is_called_by_its_name():
    (row,) = placement_sheets.part_sheet(streamed_plan(parts=(block(7),))).rows
    assert row == ("model.layers.7", "in memory", "1", "100.0 MiB")


def test_slow_rows_are_counted_by_the_minute():
    slow = Duration(likely_seconds=320.0, low_seconds=300.0, high_seconds=400.0)
    assert dict(placement_sheets.key_numbers(streamed_plan(pass_time=slow)))["Speed"] == "6.0 rows/min"
    assert dict(placement_sheets.key_numbers(streamed_plan()))["Speed"] == "4.0 rows/s"


def test_every_number_has_its_place_in_the_grid():
    for plan in (streamed_plan(), linked_plan()):
        assert len(placement_sheets.key_numbers(plan)) % 2 == 0
