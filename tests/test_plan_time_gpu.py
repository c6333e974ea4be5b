"""The model of time against recorded steps of a GPU: a slice of what `benchmarks/plan_time_gpu.py` looks at in full."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import plan_time_gpu  # noqa: E402

GROUP = "bert-base bf16"


@pytest.fixture(scope="module")
def rows():
    return [row for row in plan_time_gpu.recorded_rows() if row.group == GROUP]


@pytest.fixture(scope="module")
def predicted(rows):
    """Of one and of 64 samples, and of one that is recomputed."""
    wanted = {row.setting: row for row in rows}
    settings = ("micro_batch=1", "micro_batch=64", "micro_batch=1 + checkpointing")
    return [(wanted[setting], plan_time_gpu.predict(wanted[setting].task)[0]) for setting in settings]


def test_recorded_settings_are_told_apart_as_they_were_recorded(predicted):
    found = plan_time_gpu.figures_of(*map(list, zip(*predicted, strict=True)))
    assert (found["told"], found["pairs"]) == (1, 3)


def test_seconds_are_within_the_range_that_is_stated(predicted):
    for row, seconds in predicted:
        assert 1 / (1 + plan_time_gpu.SPEED.spread) < seconds / row.seconds < 1 + plan_time_gpu.SPEED.spread


def test_passes_that_calls_bind_take_as_long_with_any_number_of_samples(rows, predicted):
    """As far apart as those recorded with 1 to 16 samples: with each of these the card waits for its calls."""
    recorded = [row.seconds for row in rows if row.samples <= 16 and "checkpointing" not in row.setting]
    (_, one), (_, most), _ = predicted
    assert one <= most < 64 * one / 16  # 64 samples take some more
    assert max(recorded) / min(recorded) < 1 + plan_time_gpu.WORTH_TELLING
    assert one == pytest.approx(recorded[0], rel=plan_time_gpu.SPEED.spread)


def test_only_settings_of_one_job_that_differ_are_compared(rows):
    fast, slow = rows[0], replace(rows[0], setting="slow", seconds=2 * rows[0].seconds)
    near, other = replace(fast, setting="near", seconds=1.05 * fast.seconds), replace(fast, group="another")
    found = plan_time_gpu.figures_of([fast, slow, near, other], [1.0, 0.5, 1.0, 9.0])
    assert (found["pairs"], found["told"]) == (2, 0)  # slow against fast, and against near
    assert found["wrong"] == [f"{GROUP}: {fast.setting} before slow", f"{GROUP}: near before slow"]


def test_every_recorded_row_that_has_a_time_is_read():
    kinds = {row.kind for row in plan_time_gpu.recorded_rows()}
    assert kinds == {"forward and backward", "step with techniques", "update", "step by hand"}


def test_a_choice_is_read_as_it_was_written_down():
    words = "micro_batch=16 + checkpointing=every 2 + optimizer_offload=host"
    found = {choice.technique: choice.options for choice in plan_time_gpu.choices_of(words)}
    assert found == {
        "micro_batch": {"samples": 16}, "checkpointing": {"blocks": "every 2"}, "optimizer_offload": {"to": "host"},
    }  # fmt: skip
