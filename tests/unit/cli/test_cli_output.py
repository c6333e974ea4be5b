"""The standard output of a command, with and without a reader."""

import json
import os
import warnings

import pytest

from plimsoll.cli.output import failure, format_warning, show, tell, told
from plimsoll.errors import JobError, PlimsollWarning
from processes import run_program

# Like `... | true`: the reader exits before anything is written.
NO_READER = """
import os, subprocess, sys
reader, writer = os.pipe()
os.close(reader)
program = "import sys; from plimsoll.cli.output import show; show('x' * int(sys.argv[1])); print('not reached')"
done = subprocess.run([sys.executable, "-c", program, *sys.argv[1:]], stdout=writer, stderr=subprocess.PIPE)
print(done.returncode, done.stderr)
"""


@pytest.mark.parametrize("num_characters", [1, 1_000_000])
def test_without_a_reader_it_ends_in_silence_as_unix_tools_do(num_characters):
    assert run_program(NO_READER, num_characters).stdout == "141 b''\n"


def test_with_a_reader_it_is_printed(capsys):
    show("a record")
    assert capsys.readouterr().out == "a record\n"


def test_a_warning_of_ours_is_a_line_and_others_are_as_ever():
    assert format_warning(PlimsollWarning("2 files are left out"), PlimsollWarning, __file__, 1) == (
        "warning: 2 files are left out\n"
    )
    other = (UserWarning("another"), UserWarning, __file__, 1)
    assert format_warning(*other) == warnings.formatwarning(*other)
    assert "test_cli_output.py:1: UserWarning: another" in format_warning(*other)


def test_a_failure_is_one_json_object():
    assert json.loads(failure("JobError", "no 'ä'", 2)) == {"error": "JobError", "message": "no 'ä'", "exit_code": 2}


def test_what_a_process_tells_arrives_and_only_if_it_was_asked():
    tell(JobError("nobody asked"))
    with told() as file:
        assert not file.exists()
        tell(JobError("wrong"))
        assert json.loads(file.read_text()) == {"error": "JobError", "message": "wrong", "exit_code": 2}
    assert not file.exists()
    assert "PLIMSOLL_FAILURE_FILE" not in os.environ


UNREAD = """
import os
from plimsoll.cli.output import complain

reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
complain("error: nobody reads this")
complain("nor this")
print("goes on")
raise SystemExit(130)
"""


def test_a_failure_that_nobody_reads_keeps_its_exit_code():
    done = run_program(UNREAD)
    assert (done.returncode, done.stdout) == (130, "goes on\n")
