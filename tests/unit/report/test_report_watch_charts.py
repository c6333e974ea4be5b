import watch_records
from plimsoll.report.as_html import watch_page
from plimsoll.report.watch_charts import limit_chart, process_chart, speed_chart, watch_charts
from watch_records import growing, killed, use


def test_processes_stand_on_each_other_and_are_nothing_where_they_were_not():
    record = growing(3)
    late = record.samples[2].model_copy(update={"processes": (*record.samples[2].processes, use(9, 500))})
    figure = process_chart(record.model_copy(update={"samples": (*record.samples[:2], late)})).figure
    assert [(trace["name"], list(trace["y"])) for trace in figure["data"]] == [
        ("9 python", [0, 0, 500]), ("7 python", [100, 110, 120]), ("8 python", [50, 50, 50]),
    ]  # fmt: skip
    assert {trace["stackgroup"] for trace in figure["data"]} == {"processes"}


def test_more_than_eight_processes_are_summed():
    sample = growing(1).samples[0].model_copy(update={"processes": tuple(use(pid, pid) for pid in range(1, 13))})
    traces = process_chart(growing(1).model_copy(update={"samples": (sample,)})).figure["data"]
    assert (len(traces), traces[-1]["name"], list(traces[-1]["y"])) == (9, "4 others", [1 + 2 + 3 + 4])


def test_limits_are_percent_with_a_line_at_100_and_marks_where_it_warned():
    figure = limit_chart(killed()).figure
    machine, group, warning = figure["data"]
    assert (set(machine["y"]), group["y"][0], group["y"][-1]) == ({40}, 10, 99)
    assert warning["x"][0] == 120
    assert [shape["y0"] for shape in figure["layout"]["shapes"]] == [100]


def test_a_run_has_its_speed_and_nothing_else_does():
    assert list(speed_chart(watch_records.run_watch()).figure["data"][0]["y"]) == [12345, 12345, 12345]
    assert [chart.key for chart in watch_charts(watch_records.run_watch())] == ["processes", "limits", "speed"]
    assert [chart.key for chart in watch_charts(killed())] == ["processes", "limits"]


def test_a_recording_without_samples_has_a_page_without_charts():
    assert all(chart.figure is None for chart in watch_charts(growing(0)))
    page = watch_page(growing(0))
    assert "No sample of" in page
    assert len(page) < 100_000


def test_a_long_recording_is_a_page_under_6_mb_and_its_highest_is_drawn():
    record = growing(5000, 1)
    assert len(watch_page(record).encode()) < 6_000_000
    assert max(process_chart(record).figure["data"][0]["y"]) == round(5099 / 1024, 4)  # MiB, drawn in GiB


def test_names_of_processes_are_escaped():
    hostile = use(7).model_copy(update={"name": "</script><b>"})
    sample = growing(1).samples[0].model_copy(update={"processes": (hostile,)})
    assert "</script><b>" not in watch_page(growing(1).model_copy(update={"samples": (sample,)}))
