"""One thread: the tensors here are so small that waiting for a second one would be most of the time."""

from pathlib import Path

import pytest
import torch
from small_runs import make_run, small_job, write_text

torch.set_num_threads(1)


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
