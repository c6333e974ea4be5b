"""The diagnosis of an error's text or of a log: the last out-of-memory error in it, and the causes its numbers name.

What would fix it is said where the numbers bound it: what other processes hold, what the allocator holds and cannot
use, what is missing. The file that its traceback names is checked for mistakes that cost memory, if it is here and has
the line that the traceback shows. Does NOT know the training that failed, so it says nothing of techniques.
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

_MOST_CODE_BYTES = 128 << 10  # checked in seconds, also where nothing else is in it than mistakes
_MOST_MISTAKES = 5
_CAUSES = {"host_ram": "true_capacity", "tiny_shm": "shm"}  # whose words in a text's labels are others

_POOL = (
    "A process of a pool ended without a word, as one does that the kernel kills for memory, or that crashes: "
    "`dmesg | grep -i oom` tells which, and `plimsoll watch` shows how much the processes use."
)


def diagnosis_of_text(file: BinaryIO, subject: str, report: Callable[[int], None] = lambda _: None) -> Diagnosis:
    """Read a text or a log to its end and explain the last out-of-memory error in it.

    Args:
        file: of bytes.
        subject: what it is called.
        report: called now and then with how many characters were read.
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
    """Every cause that the text names, the likely one first."""
    evidence = Evidence(subject=subject, kind="unknown", event=event)
    likely = _CAUSES.get(event.likely_cause or "", event.likely_cause)
    found = [finding for find in every_cause().values() for finding in find(evidence)]
    return tuple(sorted(found, key=lambda finding: finding.cause != likely))


def _remedies(found: tuple[Finding, ...]) -> tuple[Remedy, ...]:
    """What the text bounds: it cannot free more than that."""
    return tuple(
        Remedy(text=str(one.remedy), code=one.code, saving_high_bytes=one.effect_high_bytes, known="bound")
        for one in found
        if one.effect_high_bytes is not None
    )


def _notes(event: OomText, log: Log, is_explained: bool) -> list[str]:
    if not event.is_oom:
        nothing = f"No text that means out of memory was found in {log.num_lines:,} line{'s' * (log.num_lines != 1)}."
        return [nothing, _POOL] if "terminated abruptly" in log.tail else [nothing]
    notes = [] if is_explained else [_unknown(event)]
    others = len(log.events) - 1
    if others > 0:
        stand = "error stands" if others == 1 else "errors stand"
        notes.append(f"{others:,} other out-of-memory {stand} above the last one.")
    return notes + _mistakes(event)


def _mistakes(event: OomText) -> list[str]:
    """What the check of code finds in the file of an error's place, if that file is here and as it was."""
    path, line = Path(event.place.rpartition(":")[0]), event.place.rpartition(":")[2]
    found: tuple[LintFinding, ...] = ()
    with suppress(OSError):  # it is of another machine or another user
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
            f"{format_bytes(event.free)} were free when {format_bytes(event.tried_to_allocate)} were asked for, so the "
            "text does not say why it failed: another process may have held the memory for a moment, or one piece of "
            "that size was not to be had."
        )
    return "The text states no sizes, so it does not say what used the memory: look for an earlier message with sizes."
