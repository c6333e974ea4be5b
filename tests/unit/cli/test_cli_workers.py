"""The two commands behind `plimsoll train`: what they accept, and what they do in the directory of a run."""

from __future__ import annotations

import pytest
import typer

from plimsoll.cli.main import app
from plimsoll.data.prepare import Prepared

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("prepare-worker", ["--quiet"]),
        ("train-worker", ["--resume", "--from-step", "--resume-newest", "--micro-batch", "--restarts", "--quiet"]),
    ],
)
def test_the_flags_are_these_and_people_are_not_shown_them(command, flags):
    parameters = COMMANDS[command].params
    assert [flag for parameter in parameters for flag in parameter.opts if flag.startswith("-")] == flags
    assert COMMANDS[command].hidden


def test_what_the_cache_holds_is_found_again(call, finished, run_copy):
    before = Prepared.load(run_copy / "prepared.json")
    (run_copy / "prepared.json").unlink()
    assert call("prepare-worker", run_copy, finished.cache, "--quiet") == (0, "", "")
    assert Prepared.load(run_copy / "prepared.json") == before


def test_a_folder_without_a_run_is_refused(refused, tmp_path):
    assert f"{tmp_path} is not a run directory (it has no job.yaml)" in refused("train-worker", tmp_path)


def test_a_checkpoint_that_is_not_there_is_refused(refused, run_copy):
    assert "7" in refused("train-worker", run_copy, "--resume", "--from-step", 7, "--quiet")
