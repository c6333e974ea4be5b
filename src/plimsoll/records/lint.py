"""The findings of `plimsoll lint`: mistakes that cost memory, or that silently disable a way to save memory."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record


class LintFinding(Frozen):
    """One mistake in a source file.

    Attributes:
        file: the path of the source file, as given or as found in a given folder.
        line: line number, from 1.
        column: column in characters, from 1.
        rule: the name of the rule, also the name of its page in the documentation.
        severity: ``error``: the code fails or computes something else; ``warning``: it costs memory or time; ``note``:
            worth a look.
        message: a sentence that describes the mistake.
        remedy: the code that replaces the mistake, or the change to make.
        code: the source line.
        is_fixable: true if ``--fix`` can correct it.
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
    """A source file that could not be checked, and the reason."""

    file: str
    reason: str


class LintReport(Record):
    """Every mistake, sorted by file and line.

    Attributes:
        findings: the mistakes that remain, after fixes if any were made.
        num_files: the number of checked files.
        num_lines: the number of lines in the checked files.
        num_fixed: the number of mistakes that were fixed in place.
        unread: files that could not be checked.
    """

    record_kind: ClassVar[str] = "lint"

    findings: tuple[LintFinding, ...]
    num_files: int
    num_lines: int
    num_fixed: int = 0
    unread: tuple[Unread, ...] = ()
