"""Progress bars of long work are drawn on standard error, or not at all."""

import pytest

from plimsoll.processes.timings import begin, end
from plimsoll.report.progress import row_rates, spinner, stages


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


def test_a_spinner_says_what_is_done_on_a_terminal_and_nothing_else(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat this as a terminal
    monkeypatch.setenv("TERM", "xterm")
    text = ""
    with spinner(quiet=False) as say:
        say("tracing [step]\n1")
        while "tracing [step] 1  0." not in text:
            output = capfd.readouterr()
            assert output.out == ""
            text += output.err
    assert capfd.readouterr().err.endswith("\x1b[J")  # the line is erased


def test_without_a_process_to_draw_it_there_is_no_line(capfd, monkeypatch):
    def refuse(*arguments, **options):
        raise BlockingIOError

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("subprocess.Popen", refuse)
    with spinner(quiet=False) as say:
        say("tracing")
    assert capfd.readouterr() == ("", "")


def test_bars_take_the_place_of_the_line(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    text = ""
    with stages(quiet=False) as report:
        while "loading  0." not in text:
            text += capfd.readouterr().err
        report("index", 1, 2)
        text = capfd.readouterr().err
        assert text.index("\x1b[J") < text.index("index")
        report("index", 2, 2)
    assert "loading" not in capfd.readouterr().err


@pytest.mark.parametrize("quiet", [True, False])
def test_the_seconds_are_noted_also_of_what_is_not_shown(quiet, monkeypatch, tmp_path, capsys):
    begin(str(tmp_path / "x"))
    with spinner(quiet, "checking") as say:
        say("tracing: one")
        say("searching")
        say("tracing: two")
    with stages(quiet) as report:
        report("index", 1, 2)
        report("tokens", 1, 2)
        report("index", 2, 2)
    end()
    said = [line.split() for line in capsys.readouterr().err.splitlines() if line.startswith("    0.0    ")]
    noted = [stage for _, stage in said]
    assert noted == ["checking", "tracing", "searching", "loading", "index", "tokens"]


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
        pass  # a refused command has no bar
    assert capsys.readouterr().err == ""
