"""The sentences and tables of a report, compared with the hand-built runs of `report_records`."""

from __future__ import annotations

import pytest
from report_records import MIB, cpu, empty_run, eventful_run, gpu, step_line

from plan_records import fitting_plan
from plimsoll.records.device import Budget
from plimsoll.records.plan import Plan
from plimsoll.records.run import EvaluationLine, GradientReach, OomEvent, Timeline
from plimsoll.report import as_text, sheets


def run_at(peak_bytes: int, limit_bytes: int | None):
    plan = Plan(budget=Budget(device_bytes=limit_bytes), fallbacks=())
    return empty_run(plan=plan, timeline=Timeline(source="measured", time_seconds=(0.0,), used_bytes=(peak_bytes,)))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (run_at(768 * MIB, 1024 * MIB), "Peak 768.0 MiB of a 1.0 GiB budget (75 %): the run stayed within budget."),
        (
            run_at(1024 * MIB - 1, 1024 * MIB),
            "Peak 1.0 GiB of a 1.0 GiB budget (99 %): the run stayed within budget.",
        ),
        (run_at(1024 * MIB, 1024 * MIB), "Peak 1.0 GiB of a 1.0 GiB budget (100 %): the run stayed within budget."),
        (
            run_at(1280 * MIB, 1024 * MIB),
            "Peak 1.2 GiB of a 1.0 GiB budget (125 %): the run went over budget by 256.0 MiB.",
        ),
        (run_at(768 * MIB, None), "Peak 768.0 MiB; no budget was set."),
        (empty_run(), "No memory was measured; the budget is 1.0 GiB."),
        (empty_run(plan=Plan(budget=Budget(), fallbacks=())), "Peak unknown; no budget was set."),
    ],
)
def test_the_headline_says_whether_the_run_stayed_under_the_line(record, sentence):
    assert sheets.line_sentence(record) == sentence


def test_key_numbers_of_a_run_with_a_restart():
    assert dict(sheets.key_numbers(eventful_run())) == {
        "Steps": "4 of 4",
        "Throughput": "500 tokens/s",
        "Time to last step": "11.0 s",
        "Micro-batch": "64 at start, 64 at end",
        "First loss": "8.000",
        "Last loss": "1.000",
        "Validation loss": "1.500 at step 4",
        "Last checkpoint": "step 2",
        "Peak memory": "768.0 MiB",
        "Budget": "1.0 GiB",
        "OOM events": "1, all survived",
        "Restarts": "1",
    }


def test_how_far_gradients_reach_is_said_where_that_is_known():
    reach = GradientReach(most_tokens=1023, mean_tokens=400.25)
    numbers = dict(sheets.key_numbers(eventful_run(gradient_reach=reach)))
    assert numbers["Gradient reach"] == "at most 1,023 tokens"
    assert numbers["Mean gradient reach"] == "400.2 tokens"
    assert "Gradient reach" in as_text.plain(as_text.run_table(eventful_run(gradient_reach=reach)))


def test_key_numbers_of_a_run_in_which_nothing_happened():
    numbers = dict(sheets.key_numbers(empty_run(job={})))
    assert numbers["Steps"] == "0"
    assert numbers["Throughput"] == "unknown"
    assert numbers["Micro-batch"] == "not started"
    assert numbers["Last loss"] == numbers["Validation loss"] == numbers["OOM events"] == "none"


def test_a_step_repeated_after_a_restart_counts_once_as_written_last():
    steps = eventful_run().finished_steps
    assert [line.step for line in steps] == [1, 2, 3, 4]
    assert [line.loss for line in steps] == [8, 4, 2, 1]


def test_one_micro_batch_all_along_is_said_as_such():
    record = empty_run(steps=(step_line(1), step_line(2)))
    assert dict(sheets.key_numbers(record))["Micro-batch"] == "64 throughout"


def test_classification_counts_samples_and_shows_accuracy():
    evaluation = EvaluationLine(time_seconds=1.0, step=1, loss=0.5, num_samples=8, num_units=8, accuracy=0.875)
    record = empty_run(job={"task": "classification"}, steps=(step_line(1),), evaluations=(evaluation,))
    numbers = dict(sheets.key_numbers(record))
    assert numbers["Throughput"] == "500 samples/s"
    assert numbers["Validation loss"] == "0.5000 at step 1, accuracy 87.5%"


@pytest.mark.parametrize(
    ("loss", "text"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (float("-inf"), "-infinite"), (2.5, "2.500")]
)
def test_a_loss_that_is_not_finite_is_named(loss, text):
    assert sheets.format_loss(loss) == text


def test_an_oom_event_that_nothing_is_known_of_says_so():
    bare = OomEvent(family="std::bad_alloc", survived=False)
    assert sheets.oom_sheet([bare]).rows == (("none", "unknown", "std::bad_alloc", "unknown", "unknown", "none"),)
    assert dict(sheets.key_numbers(empty_run(oom_events=(bare,))))["OOM events"] == "1, 0 survived"


def test_of_several_ranks_the_least_and_the_most_are_named_and_where_memory_ran_out():
    """The lowest and the highest peak of several ranks are named.

    Only steps with the final number of ranks count. The step with three ranks had a higher peak.
    """
    steps = (
        step_line(1, peak_bytes=900 * MIB, peak_bytes_of_ranks=(900 * MIB, 700 * MIB, 500 * MIB)),
        step_line(2, peak_bytes=650 * MIB, peak_bytes_of_ranks=(600 * MIB, 650 * MIB)),
        step_line(3, peak_bytes=640 * MIB, peak_bytes_of_ranks=(640 * MIB, 630 * MIB)),
    )
    numbers = dict(sheets.key_numbers(empty_run(steps=steps)))
    assert numbers["Ranks"] == "2"
    assert numbers["Peak per rank"] == "640.0 MiB (rank 0) to 650.0 MiB (rank 1)"
    assert numbers["Peak memory"] == "900.0 MiB"
    assert "Ranks" not in dict(sheets.key_numbers(eventful_run()))
    event = OomEvent(family="memory-error", rank=2)
    sheet = sheets.oom_sheet([event, event.model_copy(update={"num_other_ranks": 1})])
    assert [row[2] for row in sheet.rows] == ["memory-error, rank 2", "memory-error, rank 2 and 1 more"]


def test_an_oom_event_shows_what_was_done():
    (row,) = sheets.oom_sheet(eventful_run().oom_events).rows
    assert row == (
        "2",
        "backward",
        "cpu-allocator",
        "128.0 MiB",
        "960.0 MiB",
        "undone, took fallback 1",
    )


def test_what_the_plan_said_stands_beside_what_was_measured():
    """The predicted values are shown next to the measured values.

    The steps after the first take 2 s each. Steps of another fallback do not count.
    """
    numbers = dict(sheets.key_numbers(eventful_run(plan=fitting_plan())))
    assert (numbers["Predicted peak"], numbers["Predicted step time"]) == ("1000.0 MiB", "1.9 s, measured 2.0 s")
    steps = (step_line(1), step_line(2, fallback=1))
    assert dict(sheets.key_numbers(eventful_run(plan=fitting_plan(), steps=steps)))["Predicted step time"] == "1.9 s"


@pytest.mark.parametrize(("num_steps", "shown"), [(0, 0), (1, 1), (20, 20), (21, 11), (1000, 21)])
def test_the_table_of_steps_is_thinned_and_keeps_first_and_last(num_steps, shown):
    """The table of steps is thinned, and keeps the first and the last step.

    Of 21 steps every second is shown, 1, 3, ... 19, and the last. Of 1000 steps every 50th is shown, and the last.
    """
    rows = sheets.step_sheet(empty_run(steps=tuple(step_line(step) for step in range(1, num_steps + 1)))).rows
    steps = [int(row[0].replace(",", "")) for row in rows]
    assert len(steps) == len(set(steps)) == shown
    if num_steps:
        assert (steps[0], steps[-1]) == (1, num_steps)


def test_a_device_is_bounded_by_the_limit_of_its_size_or_by_the_hardware():
    assert ("Usable", "4.0 GiB, limited by cgroup v2 memory.max") in sheets.device_sheet(cpu()).rows
    assert ("Usable", "24.0 GiB, limited by hardware") in sheets.device_sheet(gpu()).rows


def test_a_step_shorter_than_the_clock_has_no_speed():
    assert sheets.step_speed(step_line(1, step_seconds=0.0)) is None
    assert sheets.format_speed(None, "tokens") == "unknown"
    assert sheets.format_speed(12345.0, "tokens") == "12,345 tokens/s"


def test_what_preparing_took_is_said_beside_the_peak_of_training():
    assert dict(sheets.key_numbers(eventful_run(preparation_bytes=3 << 20)))["Preparation peak"] == "3.0 MiB"
    assert "Preparation peak" not in dict(sheets.key_numbers(eventful_run()))
