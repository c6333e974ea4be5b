"""The command as a whole: its commands and flags, its help, and how it ends."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from end_to_end.commands import environment
from plimsoll.cli.main import app

GROUP = typer.main.get_command(app)

# A flag is a promise: one more needs a reason that is better than `--set FIELD=VALUE`.
FLAGS = {
    "probe": ["--json"],
    "train": ["--out", "-o", "--budget", "--set", "--resume", "--from-step", "--cache", "--force", "--json"],
    "report": ["--output", "-o", "--json", "--force"],
}


def flags_of(command: str) -> list[str]:
    parameters = GROUP.commands[command].params
    return [flag for parameter in parameters for flag in parameter.opts if flag.startswith("-")]


def examples_in(screen: str) -> list[str]:
    return re.findall(r"^ {3}(plimsoll .*?) *$", screen, re.MULTILINE)


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_are_these(command):
    assert flags_of(command) == FLAGS[command]


def test_the_help_lists_the_commands_for_people(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert [name for name in GROUP.commands if re.search(rf"│ {name} ", out)] == list(FLAGS)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("command", "num_examples"), [("", 3), ("probe", 2), ("train", 4), ("report", 3)])
def test_each_example_is_a_line_of_its_own_that_the_command_accepts(command, num_examples, call):
    examples = examples_in(call(*filter(None, [command]), "--help").out)
    assert len(examples) == num_examples
    for example in examples:
        _, name, *arguments = shlex.split(example)
        assert command in ("", name)
        GROUP.commands[name].make_context(name, arguments)  # reads the arguments, and runs nothing


def test_every_flag_is_explained_in_the_help(call):
    for command, flags in FLAGS.items():
        screen = call(command, "--help").out
        for flag in flags:
            # The flag, its short form, its type, and then a sentence.
            assert re.search(rf" {flag} +(-o +)?<?[a-zA-Z=]+>? +[A-Z]", screen) or flag == "-o", (command, flag)


def test_without_a_command_the_help_is_shown(call):
    code, out, err = call()
    assert code == 2
    assert len(examples_in(out + err)) == 3


def test_the_version(call):
    assert call("--version") == (0, f"plimsoll {version('torch-plimsoll')}\n", "")


@pytest.mark.parametrize("arguments", [("tarin",), ("train", "--bugdet", "2GiB"), ("report",)])
def test_a_command_line_that_cannot_be_read_ends_with_2_and_no_traceback(arguments, call):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: " in err
    assert "Traceback" not in err


def test_the_help_is_shown_without_torch():
    program = "import sys; from plimsoll.cli.main import app; app(['--help'], standalone_mode=False); "
    program += "sys.exit(bool({'torch', 'transformers', 'pydantic'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, check=True, timeout=60)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_that_goes_away_is_met_with_silence(form, finished):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "plimsoll", "report", str(finished.path), *form]
    done = subprocess.run(command, env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
