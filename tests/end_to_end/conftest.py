"""What the end-to-end tests share: tokens made once, and one long run that nothing disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from end_to_end.commands import trained, write_job

SLOW_STEPS = 50


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tokens, made by the first run that needs them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 steps of 40 ms (two epochs and a bit), a checkpoint after every second one."""
    return write_job(tmp_path_factory.mktemp("slow") / "job.yaml", model="slow_models:slow", steps=SLOW_STEPS)


@pytest.fixture(scope="session")
def undisturbed(slow_job: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the slow job, done in one go."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(slow_job, "--out", run, "--cache", cache)
    return run


@pytest.fixture(scope="session")
def six_steps(slow_job: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first six steps of the slow job, with a checkpoint of every second one."""
    run = tmp_path_factory.mktemp("six") / "run"
    trained(slow_job, "--out", run, "--cache", cache, "--set", "steps=6", "--set", "checkpoint.keep=9")
    return run


@pytest.fixture
def short_run(six_steps: Path, tmp_path: Path) -> Path:
    """A copy of that run, to go on with."""
    return shutil.copytree(six_steps, tmp_path / "run")
