import pytest

import watch_records
from plimsoll.records.watch import RunProgress
from plimsoll.report.as_text import plain
from plimsoll.report.watch_view import run_text, sample_line, sparkline, watch_panel

RUN = watch_records.run_watch()


def test_a_line_has_memory_the_run_each_limit_and_the_warning():
    assert sample_line(RUN.samples[1]) == (
        "2.0 s · 2 processes · private 440.0 MiB · step 12 of 200, loss 5.250, 12,345 tokens/s, 96.4 samples/s, "
        "micro-batch 8, 1 out-of-memory error, killed 1 time · budget of the run 380.0 MiB of 400.0 MiB · "
        "WARNING: limit reached in about 20.0 s · memory of the machine 400.0 MiB of 1000.0 MiB · "
        "the kernel's OOM killer has killed a process"
    )


def test_a_line_without_a_run_has_none():
    assert sample_line(watch_records.growing(1).samples[0]) == (
        "0 s · 2 processes · private 150.0 MiB · memory of the machine 400.0 MiB of 1000.0 MiB · "
        "cgroup v2 memory.max of /job 100.0 MiB of 1000.0 MiB"
    )


def test_the_panel_of_a_run_has_all_of_it_within_80_columns():
    shown = plain(watch_panel(RUN.subject, RUN.samples))
    for words in (
        "run a, 4.0 s", "step 12 of 200", "budget of the run", "380.0 MiB of 400.0 MiB", "reached in about 20.0 s",
        "OOM killer has killed a process", "swap", "GPU", "64.0 MiB",
    ):  # fmt: skip
        assert words in shown
    assert "Predicted at the peak: activations 200.0 MiB, parameters 100.0 MiB" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_columns_without_a_number_are_left_out():
    record = watch_records.growing(3)
    shown = plain(watch_panel(record.subject, record.samples))
    assert "swap" not in shown
    assert "GPU" not in shown
    assert "Predicted" not in shown
    assert "▁" in shown


def test_of_many_processes_the_largest_are_shown():
    many = tuple(watch_records.use(pid, pid) for pid in range(1, 31))
    sample = RUN.samples[0].model_copy(update={"processes": many})
    shown = plain(watch_panel("this machine", [sample]))
    assert "and 20 more" in shown
    assert "30.0 MiB" in shown


@pytest.mark.parametrize(
    ("values", "least_range", "drawn"),
    [([5], 1, "▁"), ([0, 0], 0, "▁▁"), ([0, 7, 14], 0, "▁▅█"), ([100, 101], 100, "▁▁"), ([7, 0], 7, "█▁")],
)
def test_a_history_is_drawn_between_its_least_and_its_most(values, least_range, drawn):
    assert sparkline(values, least_range) == drawn


def test_a_run_that_prepares_has_no_step():
    assert run_text(RunProgress(status="preparing")) == "preparing"
    assert run_text(RunProgress(status="finished", step=3, num_steps=3)) == "finished, step 3 of 3"


def test_text_of_a_recording_is_not_read_as_markup():
    sample = RUN.samples[0].model_copy(
        update={"processes": (watch_records.use(1).model_copy(update={"name": "[red]"}),)}
    )
    assert "[red]" in plain(watch_panel("[bold]", [sample]))
