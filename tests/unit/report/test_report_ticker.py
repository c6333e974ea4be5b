"""The line with the current stage and its duration, drawn by a separate program."""

import re
import subprocess
import sys
import time

import pytest

from plimsoll.report import ticker
from plimsoll.report.ticker import drawn
from processes import LONGEST_SECONDS


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("loading", 0.3, 0.3, 80), "loading  0.3 s"),
        (("tracing: micro_batch=4", 1.2, 12.3, 80), "tracing: micro_batch=4  1.2 s of 12.3 s"),
        (("tracing: micro_batch=4", 1.2, 12.3, 24), "tracin  1.2 s of 12.3 s"),
        (("loading", 1.0, 1.0, 3), "  1.0 s"),
    ],
)
def test_a_line_has_the_stage_as_far_as_there_is_room_and_its_seconds(arguments, line):
    assert drawn(*arguments) == line


@pytest.fixture
def started():
    command = [sys.executable, "-I", "-S", ticker.__file__, "loading"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe) as process:
        yield process
        process.kill()


def seconds_said(process, stage):
    """Return the first seconds drawn for a stage, and all text drawn so far."""
    text = ""
    while len(found := re.findall(rf"{stage}  (\d+\.\d) s", text)) < 3:
        text += process.stderr.read1().decode()
    return [float(one) for one in found], text


def test_it_counts_on_its_own_says_the_last_and_clears_the_line_at_the_end(started):
    seconds, text = seconds_said(started, "loading")
    assert seconds == sorted(set(seconds))
    assert re.fullmatch(r"(\x1b\[J\nloading  \d+\.\d s\x1b\[A\r)+", text)
    started.stdin.write(b"reading\ntracing: one\ntra")
    started.stdin.flush()
    seconds, text = seconds_said(started, "tracing: one")
    assert seconds == sorted(set(seconds))
    assert "reading" not in text
    started.stdin.write(b"cing: two\n")
    started.stdin.flush()
    seconds_said(started, "tracing: two")
    started.stdin.close()
    assert started.stderr.read().endswith(b"\x1b[J")
    assert started.wait(LONGEST_SECONDS) == 0


def test_ctrl_c_is_for_the_process_that_works(started):
    started.stderr.read1()
    started.send_signal(2)
    assert started.stderr.read1()
    started.stdin.close()
    assert started.wait(LONGEST_SECONDS) == 0


def test_a_terminal_that_is_gone_is_no_error(started):
    started.stderr.read1()
    started.stderr.close()
    time.sleep(0.3)  # long enough for the line to be drawn
    started.stdin.close()
    assert started.wait(LONGEST_SECONDS) == 0
