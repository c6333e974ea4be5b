"""Fixtures of the end-to-end tests: tokens that are made once, and one long undisturbed run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from end_to_end.commands import trained, write_job

SLOW_STEPS = 50


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for tokens, which the first run that needs them makes."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a job of 50 steps of 40 ms (two epochs and a bit), with a checkpoint after every second one."""
    return write_job(tmp_path_factory.mktemp("slow") / "job.yaml", model="slow_models:slow", steps=SLOW_STEPS)


@pytest.fixture(scope="session")
def undisturbed(slow_job: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the slow job without a disturbance and return its run directory."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(slow_job, "--out", run, "--cache", cache)
    return run


@pytest.fixture(scope="session")
def six_steps(slow_job: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the first six steps of the slow job, with a checkpoint after every second one."""
    run = tmp_path_factory.mktemp("six") / "run"
    trained(slow_job, "--out", run, "--cache", cache, "--set", "steps=6", "--set", "checkpoint.keep=9")
    return run


@pytest.fixture
def short_run(six_steps: Path, tmp_path: Path) -> Path:
    """Return a copy of the run of six steps, which a test may resume."""
    return shutil.copytree(six_steps, tmp_path / "run")
