"""The sentences and tables of a plan, compared with the hand-built plans of `plan_records`."""

from __future__ import annotations

import pytest
from report_records import MIB, eventful_run, plan, step_line

from plan_records import (
    ADAFACTOR,
    CHECKPOINTS,
    HALF_CHECKPOINTS,
    OFFLOAD,
    bare_plan,
    configuration,
    constrained_plan,
    duration,
    fitting_plan,
    impossible_plan,
    rejected,
    tried_plan,
    untried_plan,
)
from plimsoll.records.device import Budget
from plimsoll.records.plan import Configuration, Duration, OffDevice, Trial, micro_batch_choice
from plimsoll.report import plan_sheets
from prediction_records import fitting, on_cpu

TIGHT = configuration(micro_batch_choice(16), mib=2040, seconds=1.0, spread_mib=10)


@pytest.mark.parametrize(
    ("changes", "verdict", "headline"),
    [
        (
            {},
            "fits",
            "Fits: 1000.0 MiB of 2.0 GiB (range 960.0 MiB to 1.0 GiB) on NVIDIA GeForce RTX 3060, about 1.9 s per step "
            "(range 1.5 to 2.3 s).",
        ),
        (
            {"fallbacks": (TIGHT,)},
            "probably fits",
            "Probably fits: 2.0 GiB of 2.0 GiB on NVIDIA GeForce RTX 3060, about 1.0 s per step.",
        ),
        (
            {"fallbacks": (TIGHT,), "limit_bytes": None, "budget": Budget(), "prediction": None},
            "fits",
            "Fits: 2.0 GiB, about 1.0 s per step.",
        ),
        (
            {"fallbacks": (Configuration(choices=(micro_batch_choice(16),)),)},
            "not predicted",
            "Not predicted: training takes a fallback when memory runs out.",
        ),
        (
            {"fallbacks": (), "smallest_budget_bytes": 13 << 30},
            "impossible",
            "Impossible: at least 13.0 GiB is needed, 11.0 GiB more than the budget of 2.0 GiB on NVIDIA GeForce RTX "
            "3060, which has 12.0 GiB: choose a larger device.",
        ),
        (
            {"fallbacks": (), "smallest_budget_bytes": 2049 * MIB + 1},
            "impossible",
            "Impossible: at least 2.0 GiB is needed, 1.0 MiB more than the budget of 2.0 GiB on NVIDIA GeForce RTX "
            "3060: give --budget 2050MiB.",
        ),
        (
            {"fallbacks": (), "smallest_budget_bytes": 5 * MIB, "limit_bytes": None, "prediction": None},
            "impossible",
            "Impossible: at least 5.0 MiB is needed, 0 B more than the budget of 2.0 GiB: give --budget 5MiB.",
        ),
    ],
)
def test_the_headline_says_whether_there_is_a_plan_and_what_to_do_if_there_is_none(changes, verdict, headline):
    made = fitting_plan(**changes)
    assert plan_sheets.verdict(made) == verdict
    assert plan_sheets.headline(made) == headline


@pytest.mark.parametrize(
    ("num_bytes", "word"),
    [
        (1, "1KiB"),
        (5 * MIB, "5MiB"),
        (5 * MIB + 1, "5121KiB"),
        (10 * MIB + 1, "11MiB"),
        (850 * MIB, "850MiB"),
        (850 * MIB + 1, "851MiB"),
        (10 << 30, "10240MiB"),
        ((10 << 30) + 1, "10.1GiB"),
    ],
)
def test_a_budget_to_type_is_never_too_small(num_bytes, word):
    assert plan_sheets.budget_word(num_bytes) == word


def test_the_limit_is_that_of_the_plan_or_of_its_prediction_or_the_budget():
    assert plan_sheets.limit_bytes_of(fitting_plan(limit_bytes=1)) == 1
    assert plan_sheets.limit_bytes_of(fitting_plan(limit_bytes=None, prediction=on_cpu())) == 1024 * MIB
    assert plan_sheets.limit_bytes_of(bare_plan(budget=Budget(device_bytes=3))) == 3
    assert plan_sheets.limit_bytes_of(bare_plan()) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Without techniques: 5.0 GiB, 3.0 GiB too much, about 1.5 s per step."),
        ({"limit_bytes": 6000 * MIB}, "Without techniques: 5.0 GiB, about 1.5 s per step."),
        (
            {"plain": configuration(micro_batch_choice(64), mib=2000, seconds=1.0, spread_mib=60)},
            "Without techniques: 2.0 GiB, up to 12.0 MiB too much, about 1.0 s per step.",
        ),
        ({"plain": None}, ""),
        ({"plain": Configuration(choices=())}, ""),
        ({"plain": fitting_plan().fallbacks[0]}, "The plan needs no technique."),
    ],
)
def test_the_plain_loop_is_compared(changes, sentence):
    assert plan_sheets.plain_sentence(fitting_plan(**changes)) == sentence


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (duration(2, 0.5), "1.5 to 2.5 s"),
        (duration(1, 0.5), "500 ms to 1.5 s"),
        (duration(2), "2.0 s"),
        (Duration(likely_seconds=90, low_seconds=61, high_seconds=122), "1 min 01 s to 2 min 02 s"),
    ],
)
def test_a_range_of_seconds_has_its_unit_once_if_it_is_the_same(time, text):
    assert plan_sheets.seconds_range_text(time) == text


def test_the_first_lossy_alternative_that_fits_is_printed_with_what_to_type():
    assert plan_sheets.alternative_sentence(impossible_plan()) == (
        "It would fit with a technique that changes the training: 1.9 GiB with --set 'allow=[adafactor]'."
    )
    assert plan_sheets.alternative_sentence(impossible_plan(limit_bytes=1)) == ""
    assert plan_sheets.alternative_sentence(fitting_plan()) == ""


def test_a_lossy_alternative_names_what_has_to_be_allowed():
    rows = plan_sheets.alternative_sheet(impossible_plan()).rows
    assert rows[0] == ("adafactor", "adafactor + checkpointing=all + micro_batch=1", "1.9 GiB", "9.5 s", "fits")


def test_constraints_are_printed():
    assert plan_sheets.constraints_sentence(constrained_plan()) == "Pinned: checkpointing=6. Forbidden: offload."
    assert plan_sheets.constraints_sentence(fitting_plan()) == ""


def test_what_lies_outside_of_the_budget_is_said_and_what_a_step_moves_of_it():
    plan = fitting_plan()
    assert plan_sheets.off_device_sentence(plan) == ""
    kept = OffDevice(kept_bytes=2 << 30, moved_bytes=9 << 30)
    on_cpu = plan.model_copy(update={"off_device": kept, "prediction": None})
    assert plan_sheets.off_device_sentence(on_cpu) == (
        "Outside the budget, 2.0 GiB is kept in files on disk; each step reads and writes 9.0 GiB there, in the page "
        "cache while the machine has enough free memory."
    )
    slow = on_cpu.model_copy(update={"off_device": kept.model_copy(update={"disk_bytes_per_second": float(100 << 20)})})
    assert plan_sheets.off_device_sentence(slow).endswith("so every step waits for the disk, at 100.0 MiB/s.")
    assert plan.prediction is not None
    prediction = plan.prediction.model_copy(update={"device_kind": "cuda"})
    on_cuda = plan.model_copy(update={"off_device": kept, "prediction": prediction})
    assert "2.0 GiB is offloaded to host memory; each step" in plan_sheets.off_device_sentence(on_cuda)


def test_what_training_the_tokenizer_takes_is_said_where_it_is_trained():
    plan = fitting_plan()
    assert plan_sheets.preparing_sentence(plan) == ""
    assert plan_sheets.preparing_sentence(plan.model_copy(update={"tokenizer_bytes": 1 << 20})) == ""
    trained = plan.model_copy(update={"tokenizer_bytes": 230 << 20})
    assert plan_sheets.preparing_sentence(trained) == (
        "Data preparation trains a tokenizer and needs up to 230.0 MiB for it."
    )


def test_a_chosen_technique_says_what_it_does_and_what_the_plan_would_need_without_it():
    assert plan_sheets.chosen_sheet(fitting_plan()).rows == (
        (
            "checkpointing=6",
            "bitwise",
            "activations of these blocks are computed again in backward, not kept",
            "Without it: 2.5 GiB, 512.0 MiB too much, about 1.6 s per step",
        ),
        (
            "micro_batch=16",
            "reordered",
            "the batch in micro-batches, whose gradients are summed",
            "Without it: 3.0 GiB, 1.0 GiB too much, about 1.8 s per step",
        ),
    )


def test_why_is_what_the_planner_says_and_that_it_was_pinned():
    whys = [row[-1] for row in plan_sheets.chosen_sheet(constrained_plan()).rows]
    assert whys == [
        "Pinned. Without it: 2.5 GiB, 512.0 MiB too much, about 1.6 s per step",
        "7 micro-batches are not faster",
    ]


def test_what_was_not_looked_at_is_not_said():
    (*_, why), _ = plan_sheets.chosen_sheet(fitting_plan(rejected=())).rows
    assert why == ""


def test_a_plan_without_numbers_lists_its_fallbacks_only():
    assert plan_sheets.chosen_sheet(plan()).rows == ()
    assert plan_sheets.key_numbers(plan()) == ()
    fallback_schedule = plan_sheets.fallback_sheet(plan())
    assert [column.title for column in fallback_schedule.columns] == ["Order", "Choices"]
    assert fallback_schedule.rows[-1] == ("fallback 2", "micro_batch=16")


def test_a_fallback_without_numbers_is_unknown_beside_others_that_have_some():
    assert plan_sheets.fallback_sheet(constrained_plan()).rows == (
        ("plan", "checkpointing=6 + micro_batch=16", "1000.0 MiB", "1.9 s"),
        ("fallback 1", "checkpointing=all + micro_batch=1", "unknown", "unknown"),
    )


def test_what_needs_least_is_no_plan():
    assert plan_sheets.fallback_sheet(impossible_plan()).rows[0][0] == "lowest peak"
    assert plan_sheets.chosen_sheet(impossible_plan()).title == "Combination with the lowest peak"


def test_a_job_that_decides_its_own_batch_has_no_sizes():
    numbers = dict(plan_sheets.key_numbers(fitting_plan(prediction=fitting(batch_size=None, micro_batch=None))))
    assert (numbers["Batch size"], numbers["Micro-batch"]) == ("set in code", "set in code")


def test_choices_are_written_as_on_a_command_line():
    assert plan_sheets.choices_text((HALF_CHECKPOINTS, OFFLOAD)) == "checkpointing=6 + offload"
    assert plan_sheets.choices_text(()) == "no technique"


def test_rejected_is_what_fits_fastest_first_then_what_is_nearly_small_enough_then_what_cannot_be_done():
    sheet = plan_sheets.rejected_sheet(fitting_plan(), 12)
    assert sheet.title == "Rejected"
    assert [row[:3] for row in sheet.rows] == [
        ("checkpointing=all + micro_batch=16", "800.0 MiB", "2.1 s"),
        ("offload + micro_batch=16", "900.0 MiB", "2.5 s"),
        ("micro_batch=16", "2.5 GiB", "1.6 s"),
        ("checkpointing=6 + micro_batch=64", "3.0 GiB", "1.8 s"),
        ("optimizer_streaming(to=disk,bucket_mib=64)", "", ""),
    ]


def test_of_many_rejected_each_kind_has_its_share():
    """If many combinations are rejected, each kind has its share of the rows.

    100 are slow, 100 are too large and 1 is impossible. Of 12 rows, the last kind gets 1, the others get 6 and 5.
    """
    fits = [rejected(micro_batch_choice(i), reason="slow", mib=i, seconds=3 + i) for i in range(100, 0, -1)]
    large = [rejected(CHECKPOINTS, reason="large", mib=2048 + i, seconds=1) for i in range(100, 0, -1)]
    no = rejected(ADAFACTOR, reason="no")
    sheet = plan_sheets.rejected_sheet(fitting_plan(rejected=(*fits, no, *large)), 12)
    assert sheet.title == "Rejected, 12 of 201"
    assert [row[-1] for row in sheet.rows] == ["slow"] * 6 + ["large"] * 5 + ["no"]
    assert sheet.rows[0][:3] == ("micro_batch=1", "1.0 MiB", "4.0 s")


def test_other_techniques_are_more_telling_than_other_options():
    """Other techniques are shown before further options of the same technique.

    The three micro-batch sizes are alike, so the slower offload comes before the second or third of them.
    """
    alike = [rejected(micro_batch_choice(size), reason="", mib=100, seconds=10 - size) for size in (4, 2, 1)]
    other = rejected(OFFLOAD, reason="", mib=100, seconds=20)
    shown = [plan_sheets.rejected_sheet(fitting_plan(rejected=(*alike, other)), most).rows for most in (2, 3, 4)]
    assert [[row[0] for row in rows] for rows in shown] == [
        ["micro_batch=4", "offload"],
        ["micro_batch=4", "micro_batch=2", "offload"],
        ["micro_batch=4", "micro_batch=2", "micro_batch=1", "offload"],
    ]


def test_without_a_limit_nothing_is_too_large():
    unlimited = fitting_plan(limit_bytes=None, budget=Budget(), prediction=None)
    assert [row[1] for row in plan_sheets.rejected_sheet(unlimited, 12).rows][:4] == [
        "2.5 GiB",
        "3.0 GiB",
        "800.0 MiB",
        "900.0 MiB",
    ]


def test_a_run_shows_how_many_steps_each_fallback_was_in_force():
    assert plan_sheets.plan_in_force_sheet(eventful_run()).rows == (
        ("plan", "micro_batch=64", "2"),
        ("fallback 1", "micro_batch=32", "2"),
        ("fallback 2", "micro_batch=16", "0"),
    )


def test_fallbacks_are_told_by_their_number_and_not_by_their_micro_batch():
    """Steps are assigned to fallbacks by number, not by micro-batch.

    The smaller last batch of an epoch does not count as a fallback, and two fallbacks may have the same micro-batch.
    """
    steps = (step_line(1, num_samples=16, micro_batch=16), step_line(2, micro_batch=16, fallback=1))
    sheet = plan_sheets.plan_in_force_sheet(eventful_run(plan=fitting_plan(), steps=steps))
    assert [row[-1] for row in sheet.rows] == ["1", "1", "0"]
    assert [column.title for column in sheet.columns] == ["Order", "Choices", "Peak", "Step time", "Steps run"]


def test_after_a_resume_only_the_steps_since_then_are_counted_and_a_restart_is_none():
    """Only the steps since the last resume are counted, and a restart does not count as a resume.

    A resume may use a new plan, but a process that replaces a killed one has the same plan.
    """
    steps = tuple(step_line(number, micro_batch=16, fallback=number % 2) for number in range(1, 8))
    begun = eventful_run().starts[0]
    starts = (begun, begun.model_copy(update={"step": 2}), begun.model_copy(update={"step": 4, "restarts": 1}))
    sheet = plan_sheets.plan_in_force_sheet(eventful_run(plan=fitting_plan(), steps=steps, starts=starts))
    assert [row[-1] for row in sheet.rows] == ["2", "3", "0"]
    assert sheet.columns[-1].title == "Last 5 steps"


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        (Budget(device_bytes=1024 * MIB, host_bytes=4096 * MIB), "Budget: device 1.0 GiB, host 4.0 GiB."),
        (Budget(host_bytes=4096 * MIB), "Budget: host 4.0 GiB."),
        (Budget(), "No budget was set: the limit is the memory of the machine."),
    ],
)
def test_the_budget_is_said(budget, sentence):
    assert plan_sheets.budget_sentence(budget) == sentence


def test_what_a_plan_was_made_for_is_listed():
    assert plan_sheets.made_for_sheet(fitting_plan()).rows == (("torch", "2.13.0"), ("sequence length", "1024"))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (fitting_plan(), "No trial: no other traced plan is about as fast."),
        (
            untried_plan(),
            "No trial yet: `plimsoll train` first times this plan and one other plan of about the same speed on the "
            "device, and takes the fastest.",
        ),
        (untried_plan().model_copy(update={"trial": Trial(left_out="2 ranks train")}), "No trial: 2 ranks train."),
        (
            tried_plan(),
            "Trial: checkpointing=all + micro_batch=8 is the fastest of 2 plans, 2.1 s per step. The trial took 6.5 s.",
        ),
        (
            tried_plan().model_copy(update={"trial": Trial(tried=tried_plan().trial.tried[2:])}),
            "Trial: none of 1 plans passed, so training starts with a fallback.",
        ),
        (impossible_plan(), ""),
        (bare_plan(), ""),
    ],
)
def test_it_is_said_whether_a_plan_was_tried(plan, sentence):
    assert plan_sheets.trial_sentence(plan) == sentence


def test_a_measured_step_is_said_first_and_what_was_predicted_beside_it():
    assert plan_sheets.headline(tried_plan()).endswith(", 2.1 s per step measured, 2.2 s predicted.")
    fallen_back = tried_plan().model_copy(update={"fallbacks": tried_plan().fallbacks[1:]})
    assert plan_sheets.headline(fallen_back).endswith(", about 4.0 s per step.")


def test_what_was_tried_is_listed_with_what_was_predicted_and_measured():
    rows = plan_sheets.trial_sheet(tried_plan()).rows
    assert [row[1:4] for row in rows] == [
        ("1.9 s", "2.5 s", "slower"),
        ("2.2 s", "2.1 s", "fastest"),
        ("1.8 s", "", "ran out"),
    ]
    assert rows[2][4].startswith("memory ran out in the forward phase")
    assert plan_sheets.trial_sheet(fitting_plan()).rows == ()
