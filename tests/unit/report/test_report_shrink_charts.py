"""The chart of quality against size: the connected points, and the line of the target."""

from __future__ import annotations

from plimsoll.report.shrink_charts import front_chart
from shrink_records import language_model, shrunk, survey


def test_the_front_is_joined_and_the_others_are_marks():
    chart = front_chart(shrunk())
    front, others = chart.figure["data"]
    assert (list(front["x"]), list(front["y"])) == ([3, 5, 16], [88.0, 89.5, 90.0])
    assert (list(others["x"]), list(others["text"]), others["mode"]) == ([8], ["layers=2"], "markers")
    assert "Higher is better. The target is 4.0 MiB." in chart.caption


def test_the_target_is_a_line_and_without_one_there_is_none():
    assert [shape["x0"] for shape in front_chart(shrunk()).figure["layout"]["shapes"]] == [4]
    assert not front_chart(survey()).figure["layout"].get("shapes")


def test_less_perplexity_is_better():
    assert "Lower is better." in front_chart(language_model()).caption
