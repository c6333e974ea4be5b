"""Options that several commands share have one definition."""

import tempfile

import pytest
import typer

from plimsoll.cli.main import app

PLIMSOLL = typer.main.get_command(app)
LONG = ["predict", "plan", "train", "apply", "shrink", "explain", "lint", "data", "embeddings"]


@pytest.mark.parametrize("name", LONG)
def test_every_command_that_shows_progress_can_be_quiet(name):
    given = PLIMSOLL.commands[name]
    for command in getattr(given, "commands", {name: given}).values():
        (quiet,) = [one for one in command.params if one.name == "quiet"]
        assert (quiet.opts, quiet.help) == (["--quiet", "-q"], "No progress.")


@pytest.mark.parametrize("name", ["predict", "plan", "train", "apply", "shrink"])
def test_every_command_that_takes_long_can_say_where_the_time_went(name, call, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job = tmp_path / "job.yaml"
    job.write_text("data: none.txt")
    required = {"apply": ("--data", "x", "--out", "x.jsonl"), "shrink": ("--out", "x")}.get(name, ())
    done = call(name, job, *required, "--timings")
    said, _, table = done.err.partition("seconds  where\n")
    assert done.code == 2
    assert said.startswith("error: ")
    assert table.splitlines()[0].endswith(f"  plimsoll {name}")
    assert list(tmp_path.iterdir()) == [job]
