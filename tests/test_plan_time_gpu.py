"""The time model against recorded GPU steps: a slice of the complete `benchmarks/plan_time_gpu.py`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import plan_time_gpu

GROUP = "bert-base fp32"


@pytest.fixture(scope="module")
def rows():
    return [row for row in plan_time_gpu.recorded_rows() if row.group == GROUP]


@pytest.fixture(scope="module")
def predicted(rows):
    """Predictions for one sample, plain and recomputed, in which the GPU waits for its calls."""
    wanted = {row.setting: row for row in rows}
    settings = ("micro_batch=1", "micro_batch=1 + checkpointing")
    return [(wanted[setting], plan_time_gpu.predict(wanted[setting].task)[0]) for setting in settings]


def test_recomputing_is_told_to_be_slower_as_it_was_recorded(predicted):
    found = plan_time_gpu.figures_of(*map(list, zip(*predicted, strict=True)))
    assert (found["told"], found["pairs"]) == (1, 1)


def test_seconds_are_as_near_as_settings_with_as_many_calls_were_to_one_another(rows, predicted):
    """With 1 and 4 samples, equally many ops are called; beyond the spread of these times, the stated range counts."""
    for row, seconds in predicted:
        is_recomputed = row.fields["checkpointing"]
        alike = [one.seconds for one in rows if one.samples <= 4 and one.fields["checkpointing"] == is_recomputed]
        spread = plan_time_gpu.SPEED.spread
        assert min(alike) / (1 + spread) < seconds < max(alike) * (1 + spread)


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


@pytest.mark.parametrize(("words", "said"), [
    (["--only", "nosuchrow"], "--only nosuchrow: none of the "),
    (["--only", "AdamW", "--hold-out"], "--hold-out needs forward and backward of two models"),
    (["--only", "bert", "--hold-out"], "--hold-out needs forward and backward of two models"),
])  # fmt: skip
def test_what_matches_nothing_is_said(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        plan_time_gpu.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
