"""The record of a check."""

from plimsoll.records.lint import LintFinding, LintReport, Unread


def test_it_comes_back_from_its_json():
    finding = LintFinding(
        file="a.py",
        line=3,
        column=5,
        rule="loss_graph_kept",
        severity="warning",
        message="kept",
        remedy="detach",
        code="t += l",
    )
    report = LintReport(
        findings=(finding,), num_files=1, num_lines=9, num_fixed=2, unread=(Unread(file="b.py", reason="line 1: bad"),)
    )
    assert LintReport.from_json(report.to_json()) == report
    assert not finding.is_fixable
