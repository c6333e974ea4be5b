"""The diagnosis of an error text or a log: the last out-of-memory error in it, and the causes that its numbers support.

A saving is only given if the numbers bound it from above: memory of other processes, or reserved but unused memory. If
the file in the traceback exists on this machine and still has the line shown, it is linted for mistakes that cost
memory. Not handled: the training run that failed is unknown, so no specific technique is suggested.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from plimsoll.diagnose.causes import every_cause
from plimsoll.diagnose.check_code import check_code
from plimsoll.diagnose.evidence import Evidence
from plimsoll.diagnose.parse.event import nothing_in
from plimsoll.diagnose.parse.log import Log, read_log
from plimsoll.records.diagnosis import Diagnosis, Finding, Remedy
from plimsoll.records.lint import LintFinding
from plimsoll.records.oom_text import OomText
from plimsoll.records.units import format_bytes

_MOST_CODE_BYTES = 128 << 10  # checked in seconds, even if it contains only mistakes
_MOST_MISTAKES = 5
_CAUSES = {"host_ram": "true_capacity", "tiny_shm": "shm"}  # likely causes of a text with other names

_POOL = (
    "A process of a pool ended without an error message: it crashed, or the kernel killed it for memory. "
    "`dmesg | grep -i oom` shows which, and `plimsoll watch` shows how much memory the processes use."
)


def diagnosis_of_text(file: BinaryIO, subject: str, report: Callable[[int], None] = lambda _: None) -> Diagnosis:
    """Read a text or a log to its end and explain the last out-of-memory error in it.

    Args:
        file: a binary file.
        subject: name of the text in the diagnosis.
        report: progress callback, called with the number of characters read.
    """
    log = read_log(file, report)
    event = log.last or nothing_in(log.tail)
    found = _findings(subject, event)
    return Diagnosis(
        subject=subject,
        event=event,
        findings=found,
        remedies=_remedies(found),
        notes=tuple(_notes(event, log, bool(found))),
    )


def _findings(subject: str, event: OomText) -> tuple[Finding, ...]:
    """Return the findings of all causes that the text supports, the likely cause first."""
    evidence = Evidence(subject=subject, kind="unknown", event=event)
    likely = _CAUSES.get(event.likely_cause or "", event.likely_cause)
    found = [finding for find in every_cause().values() for finding in find(evidence)]
    return tuple(sorted(found, key=lambda finding: finding.cause != likely))


def _remedies(found: tuple[Finding, ...]) -> tuple[Remedy, ...]:
    """Return the remedies for which the text gives an upper bound of the saving."""
    return tuple(
        Remedy(text=str(one.remedy), code=one.code, saving_high_bytes=one.effect_high_bytes, known="bound")
        for one in found
        if one.effect_high_bytes is not None
    )


def _notes(event: OomText, log: Log, is_explained: bool) -> list[str]:
    if not event.is_oom:
        nothing = f"No out-of-memory error was found in {log.num_lines:,} line{'s' * (log.num_lines != 1)}."
        return [nothing, _POOL] if "terminated abruptly" in log.tail else [nothing]
    notes = [] if is_explained else [_unknown(event)]
    others = len(log.events) - 1
    if others > 0:
        stand = "error comes" if others == 1 else "errors come"
        notes.append(f"{others:,} other out-of-memory {stand} before the last one.")
    return notes + _mistakes(event)


def _mistakes(event: OomText) -> list[str]:
    """Return the lint findings in the file that raised the error.

    Empty if the file is not on this machine or its line has changed.
    """
    path, line = Path(event.place.rpartition(":")[0]), event.place.rpartition(":")[2]
    found: tuple[LintFinding, ...] = ()
    with suppress(OSError):  # the path is from another machine or user
        if path.suffix == ".py" and path.is_file() and path.stat().st_size <= _MOST_CODE_BYTES:
            lines = path.read_text("utf-8", errors="replace").splitlines()
            if event.code and lines[int(line) - 1 : int(line)] and lines[int(line) - 1].strip().startswith(event.code):
                found = check_code([path]).findings
    if not found:
        return []
    listed = ", ".join(f"{one.rule} in line {one.line}" for one in found[:_MOST_MISTAKES])
    if len(found) > _MOST_MISTAKES:
        listed += f" and {len(found) - _MOST_MISTAKES} more"
    return [f"Mistakes in {path.name} that cost memory, or undo what saves it: {listed}. See `plimsoll lint {path}`."]


def _unknown(event: OomText) -> str:
    if event.free is not None and event.tried_to_allocate is not None:
        return (
            f"{format_bytes(event.free)} were free when {format_bytes(event.tried_to_allocate)} were requested, so the "
            "text does not show why it failed: another process may have held the memory for a moment, or no contiguous "
            "block of that size was free."
        )
    return "The text states no sizes, so it does not show what used the memory: look for an earlier message with sizes."
