"""A training with constant disturbances ends like the undisturbed one: `benchmarks/endurance.py` for a short time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from end_to_end.commands import environment

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "endurance.py"
SURVIVED = {"memory taken", "loader worker killed", "loader worker starved", "frozen"}
ENDING = {
    "training killed",
    "training killed while loading",
    "supervisor killed",
    "both killed",
    "interrupted (SIGINT)",
    "terminated (SIGTERM)",
}


def endured(folder: Path, *arguments: object) -> dict[str, Any]:
    """Return the figures of the benchmark, which must exit with 0: it found no difference."""
    command = [sys.executable, str(BENCHMARK), "--folder", str(folder), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    log = folder / "train.log"
    told = (log.read_text(errors="replace")[-4000:] if log.is_file() else "", done.stderr[-2000:], done.stdout[-4000:])
    assert done.returncode == 0, "\n".join(told)
    return json.loads(done.stdout.splitlines()[-1])


def assert_nothing_was_lost(figures: dict[str, Any]) -> None:
    assert figures["faults"] == []
    assert figures["replay"]["other_cuts"] == 0
    assert 0 < figures["memory"]["seen_peak_bytes"] <= figures["memory"]["budget_bytes"]
    assert sum(figures["done"]["ooms_survived"].values()) > 0


@pytest.mark.cold  # the budget is for a process as a user starts it
@pytest.mark.long
@pytest.mark.timeout(600)  # a busy machine is slow to load torch eight times
def test_some_seconds_of_everything(tmp_path):
    options = ("--minutes", 0.1, "--least", 7, "--every", 0.5, "--model", "lstm", "--no-plan", "--checkpoint-every", 4)
    figures = endured(tmp_path / "endurance", *options)
    assert_nothing_was_lost(figures)
    assert sum(figures["done"]["disturbances"].values()) >= 7
    assert figures["done"]["processes"] >= 2  # it was interrupted and resumed


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_ten_minutes_of_everything(tmp_path):
    figures = endured(tmp_path / "endurance", "--minutes", 10, "--every", 4)
    assert_nothing_was_lost(figures)
    assert set(figures["done"]["disturbances"]) == SURVIVED | ENDING
    assert figures["done"]["deaths_explained"] > 0
    assert figures["memory"]["long_lives"] > 0
    assert figures["ledger"]["steps_done_twice"] > 0
