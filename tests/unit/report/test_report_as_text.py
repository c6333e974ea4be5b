"""The screens of the terminal, compared with golden files, and intact at any width and with any text."""

from __future__ import annotations

from io import StringIO

import pytest
from report_records import MIB, cpu, empty_run, eventful_run, machine, plan, step_line
from rich.console import Console

import apply_records
import comparison_records
import corpus_records
import evidence_records
import placement_records
import plan_records
import prediction_records
import shrink_records
import strategy_records
import vector_records
import watch_records
from plimsoll.records.device import MemoryUse
from plimsoll.records.prediction import WhatIf
from plimsoll.report import apply_sheets, as_text, embedding_sheets


def use(used_mib: int, limit_mib: int | None) -> MemoryUse:
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    return MemoryUse(used_bytes=used_mib * MIB, peak_bytes=used_mib * MIB, reserved_bytes=0, limit_bytes=limit_bytes)


SCREENS = {
    "prediction-fits.txt": as_text.prediction_report(prediction_records.fitting()),
    "prediction-too-large.txt": as_text.prediction_report(prediction_records.too_large()),
    "prediction-empty.txt": as_text.prediction_report(prediction_records.bare()),
    "prediction-cpu.txt": as_text.prediction_report(prediction_records.on_cpu()),
    "corpus.txt": as_text.corpus_report(corpus_records.corpus_facts()),
    "tokens.txt": as_text.token_report(corpus_records.token_facts()),
    "inspection.txt": as_text.inspection_report(corpus_records.inspection()),
    "feed.txt": as_text.feed_report(corpus_records.feed_rates()),
    "vectors-subset.txt": as_text.sheets_report(embedding_sheets.subset_sheets(vector_records.subset_facts())),
    "vectors-uncounted.txt": as_text.sheets_report(embedding_sheets.subset_sheets(vector_records.uncounted())),
    "vectors-info.txt": as_text.sheets_report(embedding_sheets.vector_file_sheets(vector_records.vector_file())),
    "vectors-converted.txt": as_text.sheets_report(embedding_sheets.conversion_sheets(vector_records.conversion())),
    "vectors-compressed.txt": as_text.sheets_report(embedding_sheets.compression_sheets(vector_records.compression())),
    "ways.txt": as_text.strategies_report(strategy_records.strategies()),
    "shrink.txt": as_text.shrink_report(shrink_records.shrunk()),
    "shrink-survey.txt": as_text.shrink_report(shrink_records.survey()),
    "apply.txt": as_text.sheets_report(apply_sheets.apply_sheets(apply_records.apply_facts())),
    "apply-plain.txt": as_text.sheets_report(apply_sheets.apply_sheets(apply_records.plain_apply_facts())),
    "watch.txt": as_text.watch_report(watch_records.killed()),
    "watch-run.txt": as_text.watch_report(watch_records.run_watch()),
    "diagnosis.txt": as_text.diagnosis_report(evidence_records.diagnosis()),
    "diagnosis-unknown.txt": as_text.diagnosis_report(evidence_records.unknown_diagnosis()),
    "diagnosis-empty.txt": as_text.diagnosis_report(evidence_records.empty_diagnosis()),
    "run-eventful.txt": as_text.run_report(eventful_run()),
    "comparison.txt": as_text.comparison_report(comparison_records.comparison()),
    "run-empty.txt": as_text.run_report(empty_run(status="failed", message="The data folder is empty.")),
    "machine.txt": as_text.machine_report(machine()),
    "device.txt": as_text.device_table(cpu()),
    "plan.txt": as_text.plan_report(plan()),
    "plan-fits.txt": as_text.plan_report(plan_records.fitting_plan()),
    "plan-tried.txt": as_text.plan_report(plan_records.tried_plan()),
    "plan-constraints.txt": as_text.plan_report(plan_records.constrained_plan()),
    "plan-impossible.txt": as_text.plan_report(plan_records.impossible_plan()),
    "plan-empty.txt": as_text.plan_report(plan_records.bare_plan()),
    "placement.txt": as_text.placement_report(placement_records.streamed_plan()),
    "placement-resident.txt": as_text.placement_report(placement_records.resident_plan()),
    "placement-impossible.txt": as_text.placement_report(placement_records.impossible_plan()),
    "placement-linked.txt": as_text.placement_report(placement_records.linked_plan()),
    "run-planned.txt": as_text.run_report(eventful_run(plan=plan_records.fitting_plan())),
    "live-first.txt": as_text.live_panel("tiny", None, 200, {"device": use(200, 1024)}, None),
    "live.txt": as_text.live_panel(
        "tiny", step_line(50, loss=2.5), 200, {"device": use(512, 1024), "host": use(300, None)}, 245.0
    ),
}


@pytest.mark.parametrize("name", SCREENS)
def test_screen(name, golden):
    golden(name, as_text.plain(SCREENS[name]))


@pytest.mark.parametrize("name", SCREENS)
def test_no_screen_is_wider_than_80_columns(name):
    assert max(len(line) for line in as_text.plain(SCREENS[name]).splitlines()) <= 80


def test_an_odd_number_of_key_numbers_leaves_the_last_place_empty():
    lines = as_text.plain(as_text.run_table(eventful_run(preparation_bytes=3 * MIB))).splitlines()
    row = next(line for line in lines if "Preparation peak" in line)
    assert "3.0 MiB" in row


def test_text_of_a_record_is_not_read_as_markup():
    text = as_text.plain(as_text.run_report(empty_run(name="[bold]x[/bold] [/]", message="[red]")))
    assert "[bold]x[/bold] [/]" in text
    assert "[red]" in text
    assert "[red]" in as_text.plain(as_text.prediction_report(prediction_records.fitting(subject="[red]")))


def test_many_sequence_lengths_are_set_below_each_other():
    what_ifs = tuple(
        WhatIf(micro_batch=1, sequence_length=length, peak=prediction_records.estimate(2000 * length), fits=False)
        for length in range(1000, 1012)
    )
    text = as_text.plain(as_text.prediction_report(prediction_records.fitting(what_ifs=what_ifs)))
    assert max(map(len, text.splitlines())) <= 80
    assert [line.count("✗") for line in text.splitlines() if line.strip().startswith("1 ")] == [5, 5, 2]


@pytest.mark.parametrize(
    ("prediction", "colour"),
    [
        (prediction_records.fitting(), "green"),
        (prediction_records.on_cpu(), "yellow"),
        (prediction_records.too_large(), "red"),
    ],
)
def test_the_verdict_has_its_colour(prediction, colour):
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system="standard")
    (found,) = {
        segment.style.color.name
        for segment in console.render(as_text.prediction_panel(prediction))
        if segment.style and segment.style.color
    }
    assert found == colour


def test_a_progress_line_says_what_is_left_until_nothing_is():
    line = as_text.progress_line(step_line(3), 200, 1024 * MIB, 512 * MIB, 245.0)
    assert line == ("step 3/200  loss 2.000  512.0 MiB of 1.0 GiB  4 min 05 s left  500 tokens/s  micro-batch 64")
    unlimited = as_text.progress_line(step_line(3), 200, None, None, None, unit_name="samples")
    assert unlimited == "step 3/200  loss 2.000  500 samples/s  micro-batch 64"
    assert " left" not in as_text.progress_line(step_line(3), 3, 1024 * MIB, 512 * MIB, 0.0)


@pytest.mark.parametrize(("used_mib", "colour"), [(972, "cyan"), (973, "red")])
def test_a_memory_bar_turns_red_at_95_percent_of_the_limit(used_mib, colour):
    """A memory bar turns red at 95 % of the limit, which is 972.8 of 1024 MiB."""
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system="standard")
    panel = as_text.live_panel("tiny", None, 200, {"device": use(used_mib, 1024)}, None)
    colours = {
        segment.style.color.name
        for segment in console.render(panel)
        if segment.style and segment.style.color and "━" in segment.text
    }
    assert colour in colours
    assert len(colours & {"red", "cyan"}) == 1
