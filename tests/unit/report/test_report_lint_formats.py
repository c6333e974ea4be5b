"""The report of a check in every format."""

import json

from plimsoll.records.lint import LintFinding, LintReport, Unread
from plimsoll.report.lint_formats import as_annotations, as_lines, as_list, as_sarif, lint_sheets, sentence

REPORT = LintReport(
    findings=(
        LintFinding(
            file="a,b.py", line=3, column=5, rule="loss_graph_kept", severity="warning", message="50 % kept\nhere",
            remedy="detach", code="t += loss", is_fixable=True,
        ),
        LintFinding(
            file="c.py", line=1, column=1, rule="half_model_with_gradscaler", severity="error", message="half",
            remedy="float", code="m.half()",
        ),
    ),
    num_files=2,
    num_lines=1200,
    unread=(Unread(file="d.py", reason="line 7: bad"),),
)  # fmt: skip
NOTHING = LintReport(findings=(), num_files=1, num_lines=1)


def test_lines_have_place_rule_code_and_remedy():
    text = as_lines(REPORT)
    assert "c.py:1:1: half_model_with_gradscaler: half\n    | m.half()\n    = float\n" in text
    assert "d.py: not checked: line 7: bad\n" in text
    assert text.endswith("2 findings in 2 files, 1,200 lines. 1 not checked. 1 fixable with --fix.")
    assert as_lines(NOTHING) == sentence(NOTHING) == "Nothing found in 1 file, 1 lines."


def test_the_list_has_file_line_and_rule():
    found = json.loads(as_list(REPORT))
    assert [(one["file"], one["line"], one["rule"]) for one in found] == [
        ("a,b.py", 3, "loss_graph_kept"),
        ("c.py", 1, "half_model_with_gradscaler"),
    ]
    assert json.loads(as_list(NOTHING)) == []


def test_annotations_are_escaped_as_workflow_commands_are():
    assert as_annotations(REPORT).split("\n") == [
        "::warning file=a%2Cb.py,line=3,col=5,title=plimsoll loss_graph_kept::50 %25 kept%0Ahere; detach",
        "::error file=c.py,line=1,col=1,title=plimsoll half_model_with_gradscaler::half; float",
    ]
    assert not as_annotations(NOTHING)


def test_sarif_has_what_its_schema_requires():
    log = json.loads(as_sarif(REPORT))
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    assert driver["name"] == "plimsoll"
    assert [rule["id"] for rule in driver["rules"]] == ["half_model_with_gradscaler", "loss_graph_kept"]
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        (location,) = result["locations"]
        assert location["physicalLocation"]["region"]["startLine"] >= 1
    assert run["invocations"][0]["executionSuccessful"] is False
    assert run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"] == "not checked: line 7: bad"


def test_sheets_count_the_rules_and_name_their_pages():
    found, by_rule, unread = lint_sheets(REPORT)
    assert [row[0] for row in found.rows] == ["a,b.py:3", "c.py:1"]
    assert ("loss_graph_kept", "1", "docs/rules/loss_graph_kept.md") in by_rule.rows
    assert unread.rows == (("d.py", "line 7: bad"),)
    assert len(lint_sheets(NOTHING)) == 1
