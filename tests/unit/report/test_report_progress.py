"""Progress bars of long work go to standard error, or nowhere."""

from plimsoll.report.progress import stages


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
