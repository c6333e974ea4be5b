"""Small real runs for the tests of commands and of training.

One thread: the tensors are so small that waiting for a second one would be most of the time.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from end_to_end.commands import trained, write_job
from small_runs import make_run, small_job, write_text

torch.set_num_threads(1)


@dataclass(frozen=True)
class Finished:
    """A run of two steps; memory ran out in the backward pass of the second, for real."""

    job: Path
    cache: Path
    path: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    job, cache, path = write_job(folder / "job.yaml", steps=2), folder / "cache", folder / "run"
    done = trained(job, "--out", path, "--cache", cache, "--budget", "2GiB", PLIMSOLL_FAILPOINTS="backward@2")
    return Finished(job, cache, path, done)


@pytest.fixture
def run_copy(finished: Finished, tmp_path: Path) -> Path:
    """A copy of that run, to change."""
    return shutil.copytree(finished.path, tmp_path / "run")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    return write_text(tmp_path_factory.mktemp("text") / "ship.txt")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokens of that text are kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def new_run(tmp_path: Path, text: Path, cache: Path):
    """Make a run directory by its name and what is different in its job."""
    return lambda name="a", **changes: make_run(tmp_path / name, small_job(text, **changes), cache)
