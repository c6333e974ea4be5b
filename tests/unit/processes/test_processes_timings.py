"""The elapsed time of a command, by stage, in all its processes."""

import os
import re
import sys

import pytest

from plimsoll.processes import timings
from plimsoll.processes.timings import begin, end, note, table, timed
from processes import run_program


@pytest.fixture(autouse=True)
def of_nobody(monkeypatch):
    for name in (timings._FILE, timings._COMMAND):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_where_nobody_asked_nothing_is_noted_and_nothing_said(capsys):
    note("tracing", 1.0)
    end()
    assert capsys.readouterr() == ("", "")


def test_the_seconds_of_a_stage_are_summed_under_what_is_before_its_colon(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["plimsoll", "plan", "job.yaml"])
    begin(str(tmp_path / "x"))
    note("tracing: micro_batch=4", 1.25)
    note("searching", 0.5)
    note("tracing: micro_batch=2", 2.0)
    with pytest.raises(KeyError), timed("building"):
        raise KeyError
    end()
    assert list(tmp_path.iterdir()) == []
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == "seconds  where"
    assert lines[0].endswith("  plimsoll plan")
    assert lines[1:] == ["    3.2    tracing", "    0.5    searching", "    0.0    building"]
    end()  # everything is printed already
    assert capsys.readouterr().err == ""


STARTS_ANOTHER = """
import subprocess, sys, time
from plimsoll.processes import timings
timings.begin()
sys.argv = ["plimsoll", "train"]
worker = "sys.argv = ['plimsoll', 'train-worker']; timings.note('training', 7.0); timings.end()"
subprocess.run([sys.executable, "-c", "import sys; from plimsoll.processes import timings; " + worker], check=True)
timings.end()
"""


def test_a_process_that_is_started_notes_its_own_and_says_nothing():
    done = run_program(STARTS_ANOTHER)
    assert done.stdout == ""
    said = re.sub(r"^ +\d+\.\d", "x", done.stderr, flags=re.MULTILINE)
    assert said == "seconds  where\nx  plimsoll train-worker\nx    training\nx  plimsoll train\n"


def test_a_table_has_each_process_once_in_the_order_of_what_they_noted():
    lines = [("a", "one", 1), ("b", "two", 2), ("a", "", 3), ("b", "", 4), ("a", "one", 1), ("killed", "one", 5)]
    text = "".join(f'{{"process": "{process}", "stage": "{stage}", "seconds": {n}}}\n' for process, stage, n in lines)
    killed = ["    5.0  killed", "    5.0    one"]
    assert table(text).splitlines()[1:] == ["    3.0  a", "    2.0    one", "    4.0  b", "    2.0    two", *killed]


def test_a_file_that_is_gone_costs_the_table_and_nothing_else(monkeypatch, tmp_path, capsys):
    begin(str(tmp_path / "x"))
    os.unlink(os.environ[timings._FILE])
    monkeypatch.setenv(timings._FILE, str(tmp_path / "none" / "file"))
    note("tracing", 1.0)
    end()
    assert capsys.readouterr() == ("", "")
