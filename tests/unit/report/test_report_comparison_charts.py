"""The charts of two runs."""

import json

from comparison_records import comparison, side
from plimsoll.report.comparison_charts import category_chart, comparison_charts, loss_chart, peak_chart


def test_every_chart_has_both_runs():
    for chart in comparison_charts(comparison()):
        assert {trace["name"] for trace in chart.figure["data"]} == {"first", "second"}


def test_both_budgets_are_drawn_once_each():
    other = side(limit_bytes=512 << 20)
    assert json.dumps(peak_chart(comparison()).figure["layout"]).count("budget 1.0 GiB") == 1
    text = json.dumps(peak_chart(comparison(second=other)).figure["layout"])
    assert "budget 1.0 GiB" in text
    assert "budget 512.0 MiB" in text


def test_the_bars_are_the_bytes_of_each_category():
    bars = {
        bar["name"]: dict(zip(bar["y"], bar["x"], strict=True)) for bar in category_chart(comparison()).figure["data"]
    }
    assert bars["first"] == {"parameters": 100.0, "activations": 300.0}
    assert bars["second"] == {"parameters": 100.0, "activations": 150.0}


def test_a_chart_without_data_says_so():
    bare = side(steps=(), losses=(), peaks_bytes=(), parts={})
    for chart in comparison_charts(comparison(first=bare, second=bare)):
        assert chart.figure is None
        assert chart.caption


def test_a_loss_that_is_no_number_is_counted_and_not_drawn():
    chart = loss_chart(comparison(second=side(losses=(4.0, float("nan")))))
    assert chart.caption.endswith("not a finite number: 1 steps.")
    assert "NaN" not in json.dumps(chart.figure["data"])
