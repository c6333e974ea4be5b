"""The figures of a run: the values drawn, their units, and the values that thinning keeps."""

from __future__ import annotations

import json

import pytest
from report_records import MIB, empty_run, eventful_run, gpu, step_line

from plimsoll.records.device import Budget
from plimsoll.records.plan import Plan
from plimsoll.records.run import Timeline
from plimsoll.report import charts

NAN = float("nan")


def lines(chart) -> dict[str, tuple[list, list]]:
    return {trace["name"]: (list(trace["x"]), list(trace["y"])) for trace in chart.figure["data"]}


def test_few_points_are_drawn_as_they_are():
    points = [(0.0, 5.0), (1.0, 4.0)]
    assert charts.thinned(points, 2) == points


def test_thinned_points_keep_the_extremes_of_each_stretch_and_both_ends():
    """Thinning keeps the extremes of each stretch and both ends.

    Of eight points about four remain: 9 and 1 are the extremes of the first four, 8 and 2 of the last four.
    """
    points = [(float(x), float(y)) for x, y in enumerate([5, 9, 1, 5, 8, 2, 5, 5])]
    assert [y for _, y in charts.thinned(points, 4)] == [5, 9, 1, 8, 2, 5]


@pytest.mark.parametrize("num_points", [2001, 12345, 100_000])
def test_a_long_run_stays_under_the_number_of_points_and_keeps_its_peak(num_points):
    points = [(float(x), float(x % 7)) for x in range(num_points)]
    points[num_points // 3] = (num_points / 3, 1e9)
    kept = charts.thinned(points)
    assert len(kept) <= 2002
    assert max(y for _, y in kept) == 1e9
    assert kept == sorted(kept)


def test_memory_is_drawn_in_the_unit_of_the_peak_under_a_labelled_line():
    chart = charts.memory_chart(eventful_run())
    drawn = lines(chart)
    assert drawn["used, measured"] == ([0, 1, 3, 5, 9, 11], [200, 600, 768, 500, 520, 510])
    assert drawn["peak of each step"] == ([2, 4, 6, 9, 11], [610, 620, 630, 630, 640])
    assert drawn["highest"] == ([3], [768])
    assert drawn["out of memory"][0] == [3]
    assert drawn["process killed"][0] == [6.5]
    layout = chart.figure["layout"]
    assert layout["yaxis"]["title"]["text"] == "MiB"
    assert layout["xaxis"]["rangemode"] == "tozero"
    assert layout["shapes"][0]["y0"] == layout["shapes"][0]["y1"] == 1024
    assert layout["annotations"][0]["text"] == "budget 1.0 GiB"
    assert chart.caption == "Private memory, measured, sampled 6 times. Highest 768.0 MiB, budget 1.0 GiB."


def test_memory_known_only_per_step_and_without_a_budget():
    chart = charts.memory_chart(
        empty_run(steps=(step_line(1),), plan=Plan(budget=Budget(), fallbacks=()), device=gpu())
    )
    assert lines(chart) == {"peak of each step": ([2], [610]), "highest": ([2], [610])}
    assert "shapes" not in chart.figure["layout"]
    assert (
        chart.caption
        == "Allocated memory, measured, only the peak of each step is known. Highest 610.0 MiB in step 1, no budget."
    )


def test_of_several_ranks_each_has_a_line_also_where_their_number_changed():
    steps = (
        step_line(1, peak_bytes=700 * MIB, peak_bytes_of_ranks=(600 * MIB, 700 * MIB, 500 * MIB)),
        step_line(2, peak_bytes=650 * MIB, peak_bytes_of_ranks=(640 * MIB, 650 * MIB)),
    )
    chart = charts.ranks_chart(empty_run(steps=steps))
    assert lines(chart) == {"rank 0": ([1, 2], [600, 640]), "rank 1": ([1, 2], [700, 650]), "rank 2": ([1], [500])}
    assert chart.caption == "Peak private memory of each of 3 ranks, per step."
    assert [one.key for one in charts.run_charts(empty_run(steps=steps))][:2] == ["memory", "ranks"]


def test_long_runs_are_drawn_in_minutes_and_large_ones_in_gib():
    timeline = Timeline(source="measured", time_seconds=(0.0, 600.0), used_bytes=(1024 * MIB, 2048 * MIB))
    chart = charts.memory_chart(empty_run(timeline=timeline))
    assert lines(chart)["used, measured"] == ([0, 10], [1, 2])
    assert chart.figure["layout"]["xaxis"]["title"]["text"] == "minutes since the start"
    assert chart.figure["layout"]["yaxis"]["title"]["text"] == "GiB"


def test_a_loss_that_is_not_finite_is_left_out_and_said():
    chart = charts.loss_chart(empty_run(steps=(step_line(1), step_line(2, loss=NAN), step_line(3, loss=float("inf")))))
    assert lines(chart) == {"training": ([1], [8])}
    assert chart.caption == "Mean per token; training only. Not drawn, because not a finite number: 2 of 3 steps."


def test_a_run_whose_every_loss_is_nan_has_a_chart_without_a_line():
    chart = charts.loss_chart(empty_run(steps=(step_line(1, loss=NAN),)))
    assert lines(chart) == {}
    assert "1 of 1 steps" in chart.caption


def test_micro_batch_and_throughput_are_drawn_over_the_steps():
    record = eventful_run()
    assert lines(charts.micro_batch_chart(record)) == {"micro-batch": ([1, 2, 3, 4], [64, 32, 32, 64])}
    assert lines(charts.throughput_chart(record)) == {"tokens/s": ([1, 2, 3, 4], [500, 500, 500, 500])}


def test_a_run_without_steps_has_sentences_in_place_of_charts():
    assert [(chart.key, chart.figure, chart.caption) for chart in charts.run_charts(empty_run())] == [
        ("memory", None, "No memory was measured."),
        ("micro-batch", None, "No step has finished."),
        ("loss", None, "No step has finished."),
        ("throughput", None, "No step has finished."),
    ]


def test_every_figure_is_plain_json():
    for chart in charts.run_charts(eventful_run()):
        assert json.loads(json.dumps(chart.figure, allow_nan=False))["data"]
