"""When and how long a step waits for memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.records.run import StepLine
from plimsoll.training import pauses
from plimsoll.training.pauses import Pauses
from plimsoll.training.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Return the directory of a run of one step, which fitted with the second fallback."""
    directory = RunDirectory.create(tmp_path / "run", False)
    directory.append(
        StepLine(
            time_seconds=0.0,
            step=1,
            epoch=0,
            first_sample=0,
            num_samples=1,
            num_units=1,
            loss=1.0,
            gradient_norm=None,
            learning_rate=0.1,
            step_seconds=0.1,
            micro_batch=1,
            fallback=1,
            peak_bytes=1,
            used_bytes=1,
            updated=True,
        )
    )
    return directory


def test_only_a_step_that_has_held_with_as_much_is_waited_for_and_each_time_longer(directory, monkeypatch) -> None:
    monkeypatch.setattr(pauses, "_SECONDS", (0.0, 0.01))
    found = Pauses()
    assert found.next_seconds(directory, 0) is None  # it needs more than the fallback that fitted
    for seconds in (0.0, 0.01, None):
        assert found.next_seconds(directory, 1) == found.next_seconds(directory, 2) == seconds
        if seconds is not None:
            found.take(seconds, lambda: False)
    assert Pauses().next_seconds(directory, 1) == 0.0  # the next step


def test_a_pause_ends_when_somebody_asks_to_stop() -> None:
    asked = iter([False, True])
    Pauses().take(3600.0, lambda: next(asked))
