"""From a job, a run or a text to its diagnosis: every cause is looked for, and what explains nothing is noted."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.diagnose.evidence import ended_in_oom, evidence_of_run, evidence_of_step
from plimsoll.diagnose.findings import diagnosed
from plimsoll.diagnose.of_text import diagnosis_of_text
from plimsoll.diagnose.of_watch import diagnosis_of_watch
from plimsoll.diagnose.snapshot.of_snapshot import diagnosis_of_snapshot
from plimsoll.diagnose.snapshot.read import is_snapshot
from plimsoll.errors import InputError
from plimsoll.planning.job_checks import require_sound
from plimsoll.planning.lean_imports import leave_out_unused
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.job import Job
from plimsoll.records.run import RunRecord
from plimsoll.records.units import parse_bytes
from plimsoll.records.watch import WatchRecord, is_recording

if TYPE_CHECKING:
    from plimsoll.step.train_step import TrainStep

Progress = Callable[[str], None]

_JOB_SUFFIXES = (".yaml", ".yml")
_HEAD_BYTES = 1 << 16


def explain(
    source: str | Path | RunRecord | TrainStep,
    *,
    device: str | None = None,
    budget: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Find out what uses memory, or why it ran out, and what would free it.

    Args:
        source: a job file, before it runs; a run directory, also of a run that is going on or was killed; the record of
            a run; the `plimsoll.TrainStep` of a loop of your own; or a file with the text of an error, a log, a memory
            snapshot of CUDA, or the recording of a watch.
        device: of a job or a run, see `plimsoll.plan_job`; by default the job's.
        budget: what a job or a run may use, such as ``"2GiB"``; by default the job's.
        progress: told what is being done, where a job is dry-run.

    Raises:
        RecordError: if it is no run directory, or a file in it is damaged.
        InputError: if the file cannot be read or is another pickle, or a job cannot be predicted (see
            `plimsoll.plan_job`).
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if is_job(path):
            return _of_job(path, device, budget, progress)
        if path.is_file():
            return _of_file(path)
        if is_not_begun(path):
            return _of_job(path / "job.yaml", device, budget, progress, has_data=False)
        return _of_run(RunRecord.from_directory(path), path, device, budget, progress)
    if isinstance(source, RunRecord):
        return diagnosed(evidence_of_run(source), _survived(source))
    return diagnosed(evidence_of_step(source))


def is_job(path: Path) -> bool:
    """Whether a file is a job, by its name; other programs write YAML, too: Kubernetes names an ``apiVersion``."""
    if path.suffix.lower() not in _JOB_SUFFIXES or path.is_dir():
        return False
    with suppress(OSError), path.open("rb") as file:
        return re.search(rb"^apiVersion:", file.read(_HEAD_BYTES), re.MULTILINE) is None
    return True  # and reading it says why not


def is_not_begun(path: Path) -> bool:
    """Whether a folder is that of a run that was refused before its first step: what its job needs is known."""
    return (path / "job.yaml").is_file() and (path / "plan.json").is_file() and not (path / "run.json").exists()


def _of_job(
    path: Path, device: str | None, budget: str | int | None, progress: Progress | None, has_data: bool = True
) -> Diagnosis:
    job, limit_bytes = Job.from_yaml(path), _bytes(budget)
    require_sound(job, device, limit_bytes, has_data=has_data)
    leave_out_unused(job)
    from plimsoll.diagnose.of_job import diagnosis_of_job

    return diagnosis_of_job(job, path.name, device=device, limit_bytes=limit_bytes, progress=progress)


def _of_run(
    run: RunRecord, path: Path, device: str | None, budget: str | int | None, progress: Progress | None
) -> Diagnosis:
    if not ended_in_oom(run) and device is None and budget is None:
        return diagnosed(evidence_of_run(run), _survived(run))
    from plimsoll.diagnose.of_job import diagnosis_of_run

    return diagnosis_of_run(run, path, device=device, limit_bytes=_bytes(budget), progress=progress)


def _survived(run: RunRecord) -> tuple[str, ...]:
    """What is to be said of memory that ran out where the run went on."""
    phases = [event.phase or "an unknown phase" for event in run.oom_events if event.survived]
    if not phases:
        return ()
    times = "once" if len(phases) == 1 else f"{len(phases):,} times"
    where = ", ".join(dict.fromkeys(phases))
    return (f"Memory ran out {times} ({where}) and the run went on: `plimsoll report` of its directory shows how.",)


def _bytes(budget: str | int | None) -> int | None:
    return None if budget is None else parse_bytes(budget)


def _of_file(path: Path) -> Diagnosis:
    if is_snapshot(path):
        return diagnosis_of_snapshot(path)
    if is_recording(path):
        return diagnosis_of_watch(WatchRecord.read(path))
    if path.suffix == ".py":
        raise InputError(
            f"{path} is a program, not what it said: give that, `python {path} 2>&1 | plimsoll explain`, or use "
            f"`plimsoll lint {path}`, which finds mistakes in it"
        )
    try:
        with path.open("rb") as file:
            return diagnosis_of_text(file, path.name)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): give a file with the text of an error") from None
