"""Lint reports as text, JSON, GitHub annotations and SARIF 2.1.0, the format of code hosts and editors."""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import version

from plimsoll.records.lint import LintFinding, LintReport
from plimsoll.report.sheets import Sheet, columns_of

_FOUND = columns_of("Location", "Rule", "Finding", "Remedy")
_UNREAD = columns_of("File", "Reason")
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_lines(report: LintReport) -> str:
    """Return one paragraph per finding, in the style of a compiler's messages, and a summary."""
    parts = []
    for one in report.findings:
        head = f"{one.file}:{one.line}:{one.column}: {one.rule}: {one.message}"
        parts.append(f"{head}\n    | {one.code}\n    = {one.remedy}\n")
    parts += [f"{one.file}: not checked: {one.reason}\n" for one in report.unread]
    return "\n".join([*parts, sentence(report)])


def sentence(report: LintReport) -> str:
    """Return a summary: the number of findings, files and lines."""
    found = len(report.findings)
    where = f"{report.num_files:,} file{'s' * (report.num_files != 1)}, {report.num_lines:,} lines"
    what = "Nothing found" if not found else f"{found:,} finding{'s' * (found != 1)}"
    fixed = f", {report.num_fixed:,} fixed" if report.num_fixed else ""
    num_fixable = sum(one.is_fixable for one in report.findings)
    hint = f" {num_fixable:,} fixable with --fix." if num_fixable else ""
    unread = f" {len(report.unread):,} not checked." if report.unread else ""
    return f"{what} in {where}{fixed}.{unread}{hint}"


def as_list(report: LintReport) -> str:
    """Return a JSON list of the findings, one object each."""
    return json.dumps([one.model_dump(mode="json") for one in report.findings], ensure_ascii=False, indent=1)


def as_annotations(report: LintReport) -> str:
    """Return GitHub workflow commands, one line per finding."""
    return "\n".join(_annotation(one) for one in report.findings)


def _annotation(one: LintFinding) -> str:
    level = "error" if one.severity == "error" else "warning" if one.severity == "warning" else "notice"
    place = f"file={_property(one.file)},line={one.line},col={one.column},title={_property('plimsoll ' + one.rule)}"
    return f"::{level} {place}::{_data(f'{one.message}; {one.remedy}')}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(report: LintReport) -> str:
    """Return a SARIF 2.1.0 log (https://docs.oasis-open.org/sarif/sarif/v2.1.0/)."""
    rules = sorted({one.rule for one in report.findings})
    driver = {
        "name": "plimsoll",
        "version": version("torch-plimsoll"),
        "rules": [{"id": rule, "shortDescription": {"text": rule.replace("_", " ")}} for rule in rules],
    }
    failed = [
        {
            "level": "error",
            "message": {"text": f"not checked: {one.reason}"},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": one.file}}}],
        }
        for one in report.unread
    ]
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(one, rules.index(one.rule)) for one in report.findings],
        "invocations": [{"executionSuccessful": not report.unread, "toolExecutionNotifications": failed}],
    }
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, ensure_ascii=False, indent=1)


def _result(one: LintFinding, rule_index: int) -> dict[str, object]:
    region = {"startLine": one.line, "startColumn": one.column, "snippet": {"text": one.code}}
    return {
        "ruleId": one.rule,
        "ruleIndex": rule_index,
        "level": one.severity,
        "message": {"text": f"{one.message}; {one.remedy}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": one.file}, "region": region}}],
    }


def lint_sheets(report: LintReport) -> tuple[Sheet, ...]:
    """Return the sheets of the findings, the number of findings per rule, and the files that were not checked."""
    rows = tuple(
        (f"{one.file}:{one.line}", one.rule, f"{one.message}\n{one.code}", one.remedy) for one in report.findings
    )
    counts = Counter(one.rule for one in report.findings).most_common()
    sheets = [Sheet(sentence(report), _FOUND, rows)]
    if counts:
        by_rule = tuple((rule, f"{count:,}", f"docs/rules/{rule}.md") for rule, count in counts)
        sheets.append(Sheet("By rule", columns_of("Rule", "Findings", "Page"), by_rule))
    if report.unread:
        sheets.append(Sheet("Not checked", _UNREAD, tuple((one.file, one.reason) for one in report.unread)))
    return tuple(sheets)
