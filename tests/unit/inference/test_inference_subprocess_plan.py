"""The plan of an inference command, made in another process: its text length, and errors if no plan fits."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from model_folders import model_folder
from placement_records import streamed_plan
from plimsoll.errors import BudgetError, InputError, WeightsError
from plimsoll.inference.subprocess_plan import _said, length_to_plan, plan_apart
from prediction_records import MIB


def _unplanned(why: str) -> InputError:
    return InputError(f"cannot plan inference with m ({why}): leave --budget out, or correct the cause")


@pytest.mark.parametrize(
    ("longest_seen_tokens", "longest_tokens", "expected"),
    [
        (0, None, 64),
        (1, None, 64),
        (64, None, 64),
        (65, None, 128),
        (128, None, 128),
        (129, None, 256),
        (300, 512, 512),
        (300, 400, 400),
        (9, 16, 16),
        (300, 513, 512),
    ],
)
def test_it_is_made_for_the_texts_that_were_seen_with_room(
    longest_seen_tokens: int, longest_tokens: int | None, expected: int
) -> None:
    assert length_to_plan(longest_seen_tokens, longest_tokens) == expected


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the planning process by a stub with a fixed plan, and return the list of its arguments."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        given = dict(pairwise(command))
        asked.append(command[command.index("plan") + 1 :])
        fits = int(given["--budget"]) > 9 * MIB
        plan = streamed_plan() if fits else streamed_plan(limit_bytes=MIB, smallest_budget_bytes=9 * MIB + 1)
        plan.save(Path(given["--output"]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_what_is_asked_for_is_what_is_applied(planned: list[list[str]]) -> None:
    assert plan_apart(Path("m"), "score", 64, 0, 1016 * MIB, "cpu", "stored") == streamed_plan()
    plan_apart(Path("m"), "generate", 128, 5, 1016 * MIB, "cuda", "bf16")
    (score, generate) = ([one for one in command if "plan.json" not in one] for command in planned)
    assert score == [
        *("m", "--inference", "--task", "score", "--max-length", "64", "--budget", str(1016 * MIB)),
        *("--device", "cpu", "--output", "--json", "--dtype", "stored"),
    ]
    assert generate[-5:] == ["--json", "--max-new-tokens", "5", "--dtype", "bf16"]


def test_what_fits_nowhere_is_refused_with_what_would_do(planned: list[list[str]]) -> None:
    with pytest.raises(BudgetError, match=r"texts of 64 tokens in 9\.0 MiB: give --budget 9217KiB or more"):
        plan_apart(Path("m"), "score", 64, 0, 9 * MIB, "cpu", "stored")


@pytest.mark.slow
def test_a_plan_comes_back_or_says_what_would_fit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    plan = plan_apart(folder, "score", 64, 0, 2 << 30, "cpu", "stored")
    assert plan.fits
    assert (plan.longest_tokens, plan.budget_bytes) == (64, 2 << 30)
    with pytest.raises(BudgetError, match=r"in 64\.0 MiB: give --budget \d+MiB or more"):
        plan_apart(folder, "score", 64, 0, 64 << 20, "cpu", "stored")


def test_what_cannot_be_planned_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config.json cannot be read"):
        plan_apart(tmp_path, "score", 64, 0, 1 << 30, "cpu", "stored")


@pytest.mark.parametrize(
    ("printed", "said", "expected"),
    [
        ('{"error": "BudgetError", "message": "too large"}', "other", BudgetError("too large")),
        ('{"error": "KilledError", "message": "killed"}', "other", InputError("killed")),
        ('{"error": "AnyError", "message": "too large"}', "no room", _unplanned("no room")),
        ("{}", "a warning\nno room\n", _unplanned("no room")),
        ("[]", "no room", _unplanned("no room")),
        ("", "", _unplanned("exit code 5")),
    ],
)
def test_what_a_process_says_is_raised_and_its_last_line_where_it_says_nothing(printed, said, expected) -> None:
    found = _said(subprocess.CompletedProcess([], 5, printed, said), Path("m"))
    assert (type(found), str(found)) == (type(expected), str(expected))


def test_a_damaged_file_is_named_as_it_is_without_a_budget(tmp_path):
    """The planning process names the damaged file and the missing bytes, and the message is passed on unchanged."""
    folder = model_folder(tmp_path / "model", "GPT2LMHeadModel")
    weights = folder / "model.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(WeightsError) as raised:
        plan_apart(folder, "score", 16, 0, 1 << 31, "cpu", "stored")
    said = str(raised.value)
    assert said.startswith(f"{weights} is cut off: {len(raw) - len(raw) // 2} of its {len(raw)} bytes are missing")
    assert "--budget" not in said
