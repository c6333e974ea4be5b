"""Options that several commands have are one option."""

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
