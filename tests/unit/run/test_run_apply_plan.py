"""The plan of an application: which length it is made for, and what is said where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from model_folders import model_folder
from plimsoll.errors import BudgetError, InputError
from plimsoll.run.apply_plan import _why, length_to_plan, plan_apart


@pytest.mark.parametrize(
    ("longest_seen_tokens", "longest_tokens", "expected"),
    [(1, None, 64), (64, None, 64), (65, None, 128), (300, 512, 512), (300, 400, 400), (9, 16, 16)],
)
def test_it_is_made_for_the_texts_that_were_seen_with_room(
    longest_seen_tokens: int, longest_tokens: int | None, expected: int
) -> None:
    assert length_to_plan(longest_seen_tokens, longest_tokens) == expected


@pytest.mark.slow
def test_a_plan_comes_back_or_says_what_would_fit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    plan = plan_apart(folder, "score", 64, 0, 2 << 30, "cpu", "stored")
    assert plan.fits
    assert (plan.longest_tokens, plan.budget_bytes) == (64, 2 << 30)
    with pytest.raises(BudgetError, match=r"in 64\.0 MiB: give --budget \d+MiB or more"):
        plan_apart(folder, "score", 64, 0, 64 << 20, "cpu", "stored")


def test_what_cannot_be_planned_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot plan how .* is applied"):
        plan_apart(tmp_path, "score", 64, 0, 1 << 30, "cpu", "stored")


@pytest.mark.parametrize(
    ("printed", "said", "expected"),
    [
        ('{"message": "too large"}', "other", "too large"),
        ("{}", "a warning\nno room\n", "no room"),
        ("[]", "no room", "no room"),
        ("", "", "exit code 5"),
    ],
)
def test_a_process_that_does_not_say_why_is_told_by_its_last_line(printed: str, said: str, expected: str) -> None:
    assert _why(subprocess.CompletedProcess([], 5, printed, said)) == expected
