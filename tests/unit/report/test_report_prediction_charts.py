"""The figure of a prediction: stacked values, marks, and values that thinning keeps."""

from __future__ import annotations

import json

import pytest

from plimsoll.report.prediction_charts import prediction_chart
from prediction_records import MIB, bare, fitting, timeline, too_large


def traces(chart) -> dict[str, dict]:
    return {trace["name"]: trace for trace in chart.figure["data"]}


def test_categories_are_stacked_in_the_unit_of_the_highest_from_what_stays_to_what_goes():
    drawn = traces(prediction_chart(fitting()))
    stacked = {name: list(trace["y"]) for name, trace in drawn.items() if "stackgroup" in trace}
    assert list(stacked) == ["parameters", "optimizer states", "activations"]
    assert stacked["activations"] == [0, 400, 300, 450, 500, 0]
    assert drawn["optimizer states"]["fillcolor"] == "var(--optimizer-states)"
    assert list(drawn["reserved"]["y"]) == [120, 520, 520, 770, 900, 900]


def test_a_point_says_what_ran_with_its_brackets_escaped():
    assert list(traces(prediction_chart(fitting()))[""]["text"]) == [
        "setup: aten::empty",
        "step 1, forward: aten::mm in h.0",
        "step 1, backward: aten::mm",
        "step 2, forward: aten::mm in h.0",
        "step 2, backward: aten::mm in &lt;lambda&gt;",
        "step 2, optimizer: aten::add",
    ]


def test_the_peak_the_steps_and_the_phases_are_marked():
    """The peak, the steps and the phases are marked.

    Of rows 0 to 5, step 1 begins at 1 and step 2 at 3. Each phase has one row, with its name in the middle.
    """
    chart = prediction_chart(fitting())
    peak, layout = traces(chart)["peak"], chart.figure["layout"]
    assert (list(peak["x"]), list(peak["y"])) == ([4], [800])
    steps = {note["text"].strip(): note["x"] for note in layout["annotations"] if "step" in note["text"]}
    assert steps == {"step 1": 1, "step 2": 3}
    assert list(layout["xaxis"]["tickvals"]) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert list(layout["xaxis"]["ticktext"]) == ["setup", "forward", "backward", "forward", "backward", "optimizer"]
    shaded = [(shape["x0"], shape["x1"]) for shape in layout["shapes"] if shape["type"] == "rect"]
    assert shaded == [(2, 3), (4, 5)]


@pytest.mark.parametrize(("limit_mib", "is_drawn"), [(512, True), (3000, True), (3001, False)])
def test_the_limit_is_a_line_unless_it_would_leave_the_chart_flat(limit_mib, is_drawn):
    """The limit is a line unless it would make the chart flat.

    The highest value is the peak, 1000 MiB. A limit of up to three times the peak is drawn.
    """
    chart = prediction_chart(fitting(limit_bytes=limit_mib * MIB))
    lines = [shape for shape in chart.figure["layout"]["shapes"] if shape.get("y0") == limit_mib]
    assert len(lines) == is_drawn
    assert ("above the chart" in chart.caption) != is_drawn


def test_the_caption_says_what_the_chart_shows():
    assert prediction_chart(too_large()).caption == (
        "Predicted, in the order of allocations and frees; backward and evaluation are shaded. "
        "Highest use 800.0 MiB, limit 2.0 GiB."
    )


@pytest.mark.parametrize("num_rows", [2001, 100_000])
def test_a_long_timeline_is_thinned_and_keeps_its_peak_and_its_most_reserved(num_rows):
    used = [row % 7 * MIB for row in range(num_rows)]
    peak_row, most_reserved = num_rows // 3, num_rows // 2
    reserved = [100 * MIB] * num_rows
    reserved[most_reserved] = 5000 * MIB
    long = timeline(
        phase=("forward",) * num_rows,
        step=(1,) * num_rows,
        label=("aten::mm",) * num_rows,
        categories={"activations": tuple(used)},
        used_bytes=tuple(used),
        reserved_bytes=tuple(reserved),
        peak_row=peak_row,
    )
    rows = list(traces(prediction_chart(fitting(timeline=long)))["activations"]["x"])
    assert len(rows) <= 2004
    assert {0, num_rows - 1, peak_row, most_reserved} <= set(rows)
    assert rows == sorted(rows)


def test_a_training_of_thousands_of_phases_names_only_the_wide_ones():
    num_rows = 4000
    busy = timeline(
        phase=("forward", "backward") * (num_rows // 2),
        step=(1,) * num_rows,
        label=("",) * num_rows,
        categories={},
        used_bytes=(MIB,) * num_rows,
        reserved_bytes=(MIB,) * num_rows,
        peak_row=0,
    )
    layout = prediction_chart(fitting(timeline=busy)).figure["layout"]
    assert list(layout["xaxis"]["ticktext"]) == []
    assert len(layout["shapes"]) == 2  # the beginning of the step, and the limit


def test_without_a_timeline_there_is_a_sentence_in_place_of_a_chart():
    chart = prediction_chart(bare())
    assert (chart.figure, chart.caption) == (None, "No timeline was recorded.")


@pytest.mark.parametrize("prediction", [fitting(), too_large()])
def test_the_figure_is_plain_json(prediction):
    assert json.loads(json.dumps(prediction_chart(prediction).figure, allow_nan=False))["data"]
