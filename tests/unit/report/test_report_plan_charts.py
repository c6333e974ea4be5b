"""The chart of a plan: every configuration with predicted numbers, and the limit."""

from __future__ import annotations

import pytest
from report_records import plan

from plan_records import bare_plan, configuration, constrained_plan, fitting_plan, impossible_plan, rejected
from plimsoll.records.device import Budget
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.report.plan_charts import fallback_chart


def traces(chart):
    return {trace["name"]: trace for trace in chart.figure["data"]}


def points(trace):
    return list(zip(trace["x"], trace["y"], strict=True))


def test_every_configuration_is_a_point_of_its_kind():
    """Every configuration is a point of its kind.

    The unit is the largest value's, GiB: 5120 MiB is drawn as 5, and 1000 MiB as 0.9766.
    """
    found = traces(fallback_chart(fitting_plan()))
    assert list(found) == ["rejected, too large", "rejected", "no technique", "plan and fallbacks"]
    assert points(found["rejected, too large"]) == [(2.5, 1.6), (3.0, 1.75)]
    assert points(found["rejected"]) == [(0.8789, 2.5), (0.7812, 2.1)]
    assert points(found["no technique"]) == [(5.0, 1.5)]
    assert points(found["plan and fallbacks"]) == [(0.9766, 1.9), (0.6836, 2.25), (0.3906, 4.0)]


def test_what_would_have_to_be_allowed_is_there_too():
    assert points(traces(fallback_chart(impossible_plan()))["not allowed"]) == [(1.8555, 9.5), (3.0, 1.5)]


def test_the_limit_is_upright_and_in_sight():
    chart = fallback_chart(fitting_plan())
    (line,) = chart.figure["layout"]["shapes"]
    assert (line["x0"], line["x1"], line["yref"]) == (2.0, 2.0, "y domain")
    assert "limit 2.0 GiB" in [note["text"] for note in chart.figure["layout"]["annotations"]]
    low, high = chart.figure["layout"]["xaxis"]["range"]
    assert low < 0.3906
    assert high > 5.0
    assert chart.caption == (
        "Predicted for 8 ways to run the same step. Points left of the limit of 2.0 GiB fit. Lower is faster."
    )


def test_without_a_limit_there_is_no_line():
    chart = fallback_chart(fitting_plan(limit_bytes=None, budget=Budget(), prediction=None))
    assert "shapes" not in chart.figure["layout"]
    assert "rejected, too large" not in traces(chart)
    assert chart.caption == "Predicted for 8 ways to run the same step. Lower is faster."


@pytest.mark.parametrize("nothing", [plan(), bare_plan(), bare_plan(budget=Budget(device_bytes=5))])
def test_without_numbers_there_is_no_chart(nothing):
    assert (fallback_chart(nothing).figure, fallback_chart(nothing).caption) == (
        None,
        "No configuration was predicted.",
    )


def labels(chart):
    return [note["text"] for note in chart.figure["layout"]["annotations"] if not note["text"].startswith("limit")]


def test_the_first_fallbacks_have_their_numbers():
    assert labels(fallback_chart(fitting_plan())) == ["plan", "1", "2"]
    assert labels(fallback_chart(constrained_plan())) == ["plan"]
    assert labels(fallback_chart(impossible_plan())) == ["lowest peak"]
    many = tuple(configuration(micro_batch_choice(64 - i), mib=1000 - i, seconds=2 + i) for i in range(20))
    assert labels(fallback_chart(fitting_plan(fallbacks=many))) == ["plan", "1", "2", "3", "4", "5", "6"]


def test_a_single_point_is_in_the_middle():
    one = bare_plan(fallbacks=(configuration(micro_batch_choice(1), mib=1024, seconds=2.0),))
    layout = fallback_chart(one).figure["layout"]
    assert layout["xaxis"]["range"] == [0.5, 2.0]
    assert layout["yaxis"]["range"] == [1.0, 4.0]


def test_a_point_tells_what_it_is_and_its_text_is_no_markup():
    hostile = Choice(technique="checkpointing", options={"blocks": "<b>&"})
    chart = fallback_chart(fitting_plan(rejected=(rejected(hostile, reason="", mib=512, seconds=3.0),)))
    (text,) = traces(chart)["rejected"]["text"]
    assert text == "checkpointing=&lt;b&gt;&amp;<br>512.0 MiB, 3.0 s per step"
