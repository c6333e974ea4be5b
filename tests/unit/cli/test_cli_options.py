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
        assert (quiet.opts, quiet.help) == (["--quiet", "-q"], "Show no progress.")


SHARED = {
    *("--budget", "--calibration", "--dtype", "--json", "--max-new-tokens", "--no-header", "--pin"),
    *("--precision", "--quiet", "--set", "--task", "--timings"),
}


def test_an_option_that_commands_share_has_one_help_text():
    commands = [
        command
        for given in PLIMSOLL.commands.values()
        for command in getattr(given, "commands", {"": given}).values()
        if not command.hidden
    ]
    for name in SHARED:
        assert len({one.help for command in commands for one in command.params if name in one.opts}) == 1, name


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
