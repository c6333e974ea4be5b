"""From a run or a text to its diagnosis: every cause is looked for, and what is seen and explains nothing is noted.

Does NOT read job files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.diagnose.causes import every_cause
from plimsoll.diagnose.evidence import Evidence, evidence_of_run, evidence_of_step
from plimsoll.diagnose.of_text import diagnosis_of_text
from plimsoll.diagnose.snapshot.of_snapshot import diagnosis_of_snapshot
from plimsoll.diagnose.snapshot.read import is_snapshot
from plimsoll.errors import InputError
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.run import RunRecord
from plimsoll.records.units import format_bytes

if TYPE_CHECKING:
    from plimsoll.run.step import TrainStep


def explain(source: str | Path | RunRecord | TrainStep) -> Diagnosis:
    """Find out what used memory that need not have.

    Args:
        source: a run directory, also of a run that is going on or was killed, the record of a run, the
            `plimsoll.TrainStep` of a loop of your own, a file with the text of an error or a log, or a memory snapshot
            of CUDA.

    Raises:
        RecordError: if it is no run directory, or a file in it is damaged.
        InputError: if the file cannot be read, or is a pickle and no snapshot.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if path.is_file():
            return _of_file(path)
        source = RunRecord.from_directory(path)
    evidence = evidence_of_run(source) if isinstance(source, RunRecord) else evidence_of_step(source)
    findings = [finding for find in every_cause().values() for finding in find(evidence)]
    return Diagnosis(
        subject=evidence.subject,
        num_steps=evidence.num_steps,
        peak_bytes=evidence.peak_bytes,
        growth=evidence.growth,
        findings=tuple(sorted(findings, key=lambda finding: -(finding.effect_bytes or 0))),
        notes=_notes(evidence, bool(findings)),
    )


def _of_file(path: Path) -> Diagnosis:
    if is_snapshot(path):
        return diagnosis_of_snapshot(path)
    try:
        with path.open("rb") as file:
            return diagnosis_of_text(file, path.name)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): give a file with the text of an error") from None


def _notes(evidence: Evidence, is_explained: bool) -> tuple[str, ...]:
    growth = evidence.growth
    if evidence.num_steps and growth is None:
        num_measured = len(evidence.used_bytes)
        return (
            f"Whether memory grows cannot be told from {num_measured} measurement{'s' * (num_measured != 1)}: 11 are "
            "needed, 3 of them for the warm-up.",
        )
    if growth is not None and growth.is_steady and not is_explained:
        return (
            f"The growth of {format_bytes(growth.likely_bytes)} per step is not that of a graph that is kept: look for "
            "what your own code keeps from step to step (lists, caches, arrays); where it comes to an end after some "
            "hundred steps it is the heap, which batches of changing lengths fill slowly.",
        )
    return ()
