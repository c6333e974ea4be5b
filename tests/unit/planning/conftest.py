"""Fixtures that several modules of planning tests use."""

import pytest

from plimsoll.planning import measured_choice


@pytest.fixture
def as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache traces and answers in files, as commands do."""
    monkeypatch.setattr("plimsoll.planning.cached_traces.is_a_command", lambda: True)


@pytest.fixture
def all_candidates_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a trial run every candidate, however busy the machine is."""
    monkeypatch.setattr(measured_choice, "_MOST_SECONDS", {"cpu": 1e4, "cuda": 1e4})
