"""One small real run, made once, that the tests of the commands and of the training process read and go on with."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from end_to_end.commands import trained, write_job


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
