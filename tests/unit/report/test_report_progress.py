"""Bars on standard error, one per stage."""

from __future__ import annotations

from plimsoll.report.progress import stages


def test_each_stage_has_its_bar_and_standard_output_stays_clean(capsys):
    with stages(quiet=False) as report:
        report("index", 1, 4)
        report("index", 4, 4)
        report("tokens", 1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    bars = [line.split() for line in err.splitlines() if line.strip()]
    assert [(bar[0], bar[2]) for bar in bars] == [("index", "100"), ("tokens", "50")]


def test_quiet_draws_nothing(capsys):
    with stages(quiet=True) as report:
        report("index", 1, 4)
    assert capsys.readouterr() == ("", "")
