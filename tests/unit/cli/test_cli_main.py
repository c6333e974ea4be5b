"""The command line as a whole: its commands, flags and help, and the handling of errors."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from plimsoll.cli.main import app
from processes import LONGEST_SECONDS, environment, run_program

PLIMSOLL = typer.main.get_command(app)
COMMANDS = {
    name: command
    for given, group in PLIMSOLL.commands.items()
    for name, command in (
        {f"{given} {inner}": one for inner, one in group.commands.items()}
        if hasattr(group, "commands")
        else {given: group}
    ).items()
}

# All flags. --set changes every field of a job, so a field needs no flag: think twice before this list grows.
FLAGS = {
    "plimsoll": {"--version"},
    "probe": {"--json"},
    "predict": {
        "--device", "--budget", "--set", "--micro-batch", "--search", "--what-if", "--lengths", "--calibration",
        "--output", "-o", "--force", "--json", "--timings", "--quiet", "-q"},
    "plan": {
        "--device", "--budget", "--set", "--pin", "--forbid", "--compare", "--calibration", "--output", "-o", "--force",
        "--json",
        "--train", "--inference", "--task", "--max-length", "--max-new-tokens", "--dtype", "--export", "--timings",
        "--quiet", "-q"},
    "train": {
        "--out", "-o", "--budget", "--set", "--resume", "--from-step", "--plan", "--no-plan", "--no-trial",
        "--pin", "--forbid", "--nproc", "--cache", "--force", "--json", "--timings", "--quiet", "-q"},
    "apply": {
        "--data", "--out", "-o", "--task", "--column", "--keep", "--budget", "--batch-size", "--max-length", "--dtype",
        "--quantize", "--adapter", "--cache",
        "--device", "--max-new-tokens", "--temperature", "--top-p", "--seed", "--no-header", "--strict",
        "--force", "--timings", "--quiet", "-q", "--json",
    },
    "shrink": {
        "--out", "-o", "--target", "--method", "--forbid", "--recover", "--no-distill", "--budget", "--data",
        "--column", "--label", "--no-header", "--set", "--tries", "--samples", "--keep-all", "--force",
        "--timings", "--quiet", "-q", "--json",
    },
    "explain": {"--budget", "--device", "--apply", "--remedy", "--output", "-o", "--force", "--json", "--quiet", "-q"},
    "lint": {"--format", "--fix", "--select", "--ignore", "--json", "--quiet", "-q"},
    "report": {"--output", "-o", "--json", "--force"},
    "watch": {"--pid", "--every", "--samples", "--record", "--json"},
    "cache list": {"--json"},
    "cache clear": {"--json"},
    **{
        f"data {verb}": {"--set", "--cache", "--output", "-o", "--force", "--quiet", "-q", "--json"}
        for verb in ("index", "tokenize", "inspect", "bench")
    },
    "embeddings subset": {
        "--vocabulary", "--tokenizer", "--corpus", "--set", "--min-count", "--max-words", "--missing", "--padding",
        "--ignore-case", "--precision", "--strict", "--seed", "--output", "-o", "--cache", "--force", "--quiet", "-q",
        "--json",
    },
    "embeddings info": {"--strict", "--quiet", "-q", "--json"},
    "embeddings convert": {"--output", "-o", "--precision", "--strict", "--force", "--quiet", "-q", "--json"},
    "launch-worker": set(),
    "train-worker": {
        "--resume", "--from-step", "--resume-newest", "--fallback", "--too-large-fallback", "--restarts", "--no-trial",
        "--quiet",
    },
    "prepare-worker": {"--quiet", "--again", "--pin", "--forbid", "--tokenizer-budget-bytes"},
    "plan-worker": {"--given", "--pin", "--forbid", "--quiet", "--goes-on", "--from-step", "--keep"},
    "baseline-worker": set(),
    "shrink-worker": set(),
    "measure-worker": set(),
    "inference-baseline-worker": set(),
}  # fmt: skip


def flags_of(command):
    return {flag for parameter in command.params for flag in parameter.opts if flag.startswith("-")}


def test_there_are_these_flags_and_no_others():
    found = {name: flags_of(command) for name, command in COMMANDS.items()}
    assert {"plimsoll": flags_of(PLIMSOLL), **found} == FLAGS


def test_the_processes_that_a_run_starts_are_not_shown_to_people():
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert [name for name, command in COMMANDS.items() if command.hidden] == [
        "train-worker",
        "launch-worker",
        "prepare-worker",
        "plan-worker",
        "baseline-worker",
        "shrink-worker",
        "measure-worker",
        "inference-baseline-worker",
    ]
    visible = [name for name, command in COMMANDS.items() if not command.hidden]
    data = ["data index", "data tokenize", "data inspect", "data bench"]
    vectors = ["embeddings subset", "embeddings info", "embeddings convert"]
    assert visible == [
        "probe",
        "predict",
        "plan",
        "train",
        "apply",
        "shrink",
        "explain",
        "lint",
        "report",
        "watch",
        "cache list",
        "cache clear",
        *data,
        *vectors,
    ]
    assert all((name.split()[0] in shown) != command.hidden for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.hidden])
def test_every_help_has_examples_that_use_only_its_own_flags(name):
    examples = re.findall(rf"plimsoll {name}[^\n`]*", COMMANDS[name].help)
    assert examples
    used = {flag for example in examples for flag in re.findall(r"(?<= )--?[a-z][a-z-]*", example)}
    assert used <= FLAGS[name]
    assert f"plimsoll {name}" in CliRunner().invoke(app, [*name.split(), "--help"]).stdout


VISIBLE = [name for name, command in COMMANDS.items() if not command.hidden]
TEXTS = {name: command.help for name, command in {**PLIMSOLL.commands, **COMMANDS}.items() if not command.hidden}


@pytest.mark.parametrize("name", VISIBLE)
def test_no_line_of_a_help_text_and_no_example_wraps_at_80_columns(call, name):
    shown = [line.strip() for line in call(*name.split(), "--help").out.splitlines()]
    lines = [line.strip() for line in inspect.cleandoc(TEXTS[name]).splitlines() if line.strip("\b ")]
    assert [line for line in lines if line not in shown] == []
    examples = lines[lines.index("Examples:") + 1 :]
    assert 1 <= len(examples) <= 5


@pytest.mark.parametrize("group", ["", "cache", "data", "embeddings"])
def test_a_list_of_commands_has_one_line_for_each(call, group):
    inner = PLIMSOLL.commands[group] if group else PLIMSOLL
    shown = [line.strip("│ ").split(maxsplit=1) for line in call(*group.split(), "--help").out.splitlines()]
    for name, command in inner.commands.items():
        if not command.hidden:
            assert [name, inspect.cleandoc(command.help).split("\n\n")[0]] in shown


@pytest.mark.parametrize("name", VISIBLE)
def test_every_option_is_in_a_group(name):
    command = COMMANDS[name]
    options = [one for one in command.get_params(typer.Context(command)) if one.opts[0].startswith("-")]
    assert [one.name for one in options if not one.rich_help_panel] == []
    assert options[-1].name == "help"


def test_every_flag_says_what_it_does():
    for name, command in COMMANDS.items():
        if not command.hidden:
            assert all(parameter.help for parameter in command.params), name


def plimsoll(*arguments, **options):
    """Run the command as a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "plimsoll", *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
        **options,
    )


def test_an_error_is_one_sentence_and_its_exit_code(tmp_path):
    done = plimsoll("report", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} is not a run directory")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["no-such-command"], ["probe", "--no-such-flag"], ["report"]])
def test_what_the_command_line_does_not_know_is_bad_input(arguments):
    done = plimsoll(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage:" in done.stderr


@pytest.fixture
def waiting(tmp_path):
    """Start a command that waits for a file which nobody writes."""
    (tmp_path / "plan.json").write_text("{}")
    os.mkfifo(tmp_path / "run.json")
    command = [sys.executable, "-m", "plimsoll", "report", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    with open(tmp_path / "run.json", "w"):  # blocks until the command opens the file
        time.sleep(0.1)
        yield process
    process.wait(timeout=LONGEST_SECONDS)


def test_ctrl_c_is_no_traceback(waiting):
    waiting.send_signal(signal.SIGINT)
    output, errors = waiting.communicate(timeout=LONGEST_SECONDS)
    assert (waiting.returncode, output) == (130, "")
    assert "Traceback" not in errors


# Like `plimsoll --help | true`: the reader exits before anything is written.
NO_READER = """
import os, subprocess, sys
reader, writer = os.pipe()
os.close(reader)
done = subprocess.run([sys.executable, "-m", "plimsoll", *sys.argv[1:]], stdout=writer, stderr=subprocess.PIPE)
print(done.returncode >= 0, done.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["probe", "--json"]])
def test_nothing_is_said_to_a_reader_that_went_away(arguments):
    assert run_program(NO_READER, *arguments).stdout == "True b''\n"
