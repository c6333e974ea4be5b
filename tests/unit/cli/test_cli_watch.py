import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from plimsoll.cli.main import app
from plimsoll.errors import InputError, OutputError
from plimsoll.records.watch import WatchRecord
from plimsoll.training.run_directory import RunDirectory
from processes import LONGEST_SECONDS, environment


def _watch(*words):
    return CliRunner().invoke(app, ["watch", "--every", "0.1", "--samples", "2", *map(str, words)])


def _own(*words):
    return _watch("--pid", os.getpid(), *words)


def test_a_line_for_every_sample_and_the_same_in_the_file(tmp_path):
    file = tmp_path / "watch.jsonl"
    result = _own("--record", file)
    assert result.exit_code == 0
    record = WatchRecord.read(file)
    assert len(result.stdout.splitlines()) == len(record.samples) == 2
    assert "memory of the machine" in result.stdout
    assert (record.subject, record.end.how) == (f"process {os.getpid()}", "stopped")
    assert record.end.text in result.stderr


def test_json_is_one_record():
    record = WatchRecord.from_json(_own("--json").stdout)
    assert record.samples[0].processes[0].pid == os.getpid()
    assert record.end is not None


def test_without_a_process_it_is_this_machine():
    record = WatchRecord.from_json(_watch("--json").stdout)
    assert record.subject == "this machine"
    assert len(record.samples[0].processes) > 1


def test_a_run_is_watched_by_its_directory(tmp_path):
    directory = RunDirectory.create(tmp_path / "a", force=False)
    with directory.claimed():
        record = WatchRecord.from_json(_watch(directory.path, "--json").stdout)
    assert record.subject == "run a"
    assert {sample.run.status for sample in record.samples} == {"preparing"}


def test_a_file_that_is_there_is_left_alone(tmp_path):
    file = tmp_path / "notes"
    file.write_text("mine")
    result = _own("--record", file, "--json")
    assert isinstance(result.exception, OutputError)
    assert json.loads(result.stdout)["error"] == "OutputError"
    assert file.read_text() == "mine"


def test_two_things_at_once_and_no_run_are_bad_input(tmp_path):
    both, none = _own(tmp_path), _watch(tmp_path, "--json")
    assert isinstance(both.exception, InputError)
    assert json.loads(none.stdout)["error"] == "InputError"
    assert "no metrics.jsonl" in json.loads(none.stdout)["message"]


@pytest.fixture
def watched():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1) as process:
        yield process


def _start(*words, **options):
    command = [sys.executable, "-m", "plimsoll", "watch", "--every", "0.1", *map(str, words)]
    return subprocess.Popen(command, env=environment(), stderr=-1, text=True, process_group=0, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_being_stopped_prints_what_was_seen_and_ends_the_recording(watched, tmp_path, number):
    file = tmp_path / "watch.jsonl"
    process = _start("--pid", watched.pid, "--record", file, "--json", stdout=-1)
    while not file.exists() or file.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
    process.send_signal(number)
    output, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 128 + number
    record = WatchRecord.from_json(output)
    assert len(record.samples) >= 2
    assert record == WatchRecord.read(file)
    assert record.end.how == "stopped"
    assert "Traceback" not in errors


def test_on_a_terminal_it_is_a_live_view(watched):
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "plimsoll", "watch", "--pid", str(watched.pid), "--every", "0.1", "--samples", "3"]
    variables = environment(TERM="xterm", COLUMNS="80", LINES="40")
    with subprocess.Popen(command, env=variables, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        seen = b""
        while True:
            try:
                seen += os.read(reader, 1 << 16)
            except OSError:  # the other end is closed
                break
    os.close(reader)
    assert process.returncode == 0
    assert f"process {watched.pid}".encode() in seen
    assert "━".encode() in seen
    assert b"the watch was stopped" in seen
