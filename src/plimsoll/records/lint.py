"""What a check of Python files found: mistakes that cost memory, or that silently break what should save it."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record


class LintFinding(Frozen):
    """One mistake.

    Attributes:
        file: as it was given, or found in a folder that was.
        line: from 1.
        column: from 1, in characters.
        rule: the name of the rule, which is that of its page.
        severity: ``error``: it fails or computes something else; ``warning``: it costs memory or time.
        message: what is wrong.
        remedy: what to write instead.
        code: the line itself.
        is_fixable: whether ``--fix`` mends it.
    """

    file: str
    line: int
    column: int
    rule: str
    severity: Literal["error", "warning", "note"]
    message: str
    remedy: str
    code: str
    is_fixable: bool = False


class Unread(Frozen):
    """A file that could not be checked, and why."""

    file: str
    reason: str


class LintReport(Record):
    """Every mistake, by file and line.

    Attributes:
        findings: what is left, after the fixes if any were made.
        num_files: that were checked.
        num_lines: of them.
        num_fixed: how many mistakes were mended in place.
        unread: what could not be checked.
    """

    record_kind: ClassVar[str] = "lint"

    findings: tuple[LintFinding, ...]
    num_files: int
    num_lines: int
    num_fixed: int = 0
    unread: tuple[Unread, ...] = ()
