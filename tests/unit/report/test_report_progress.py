"""Progress bars of long work go to standard error, or nowhere."""

import subprocess
import sys

from plimsoll.report.progress import row_rates, spinner, stages
from processes import LONGEST_SECONDS, environment

SPIN = """
from plimsoll.report.progress import spinner
with spinner(quiet=False) as say:
    say("tracing [step] 1")
"""


def test_each_stage_has_its_bar_on_standard_error(capsys):
    with stages(quiet=False) as report:
        report("index", 1, 2)
        report("index", 2, 2)
        report("tokenize", 1, 4)
    output = capsys.readouterr()
    assert output.out == ""
    last = output.err.splitlines()[-2:]
    assert [line.split()[0] for line in last] == ["index", "tokenize"]
    assert "100 %" in last[0]
    assert "25 %" in last[1]


def test_quiet_draws_nothing(capsys):
    with stages(quiet=True) as report:
        report("index", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_spinner_says_what_is_done_on_a_terminal_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", SPIN],
        env=environment(FORCE_COLOR="1", TERM="xterm"),  # rich takes this for a terminal
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=True,
    )
    assert done.stdout == ""
    assert "tracing [step] 1" in done.stderr


def test_a_spinner_is_silent_without_a_terminal_and_if_it_is_to_be_quiet(capsys):
    for quiet in (False, True):
        with spinner(quiet) as say:
            say("tracing")
    assert capsys.readouterr() == ("", "")


def test_rows_are_shown_with_what_is_done_in_a_second(capsys):
    with row_rates("x.jsonl", quiet=False) as (report, loading):
        loading("loading weights", 1 << 20, 2 << 20)
        report(0, 100, 0, 0)
        report(50, 100, 1200, 36_000)
    output = capsys.readouterr()
    assert output.out == ""
    assert "x.jsonl" in output.err
    assert "50 %" in output.err
    assert "loading weights" in output.err
    assert "of 2.0 MiB" in output.err
    assert "1,200 rows" in " ".join(output.err.split())


def test_quiet_draws_no_rates(capsys):
    with row_rates("x.jsonl", quiet=True) as (report, loading):
        report(50, 100, 1, 1)
        loading("loading weights", 1, 2)
    with row_rates("x.jsonl", quiet=False):
        pass  # what is refused has no bar
    assert capsys.readouterr().err == ""
