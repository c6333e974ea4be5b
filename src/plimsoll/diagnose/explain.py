"""The entry point of ``plimsoll explain``: diagnose a job, a run, a training step or a file."""

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
    """Explain which objects use memory, or why memory ran out, and how to use less.

    Args:
        source: one of these: a job file, before it runs; a run directory, also of a running or killed run; the record
            of a run; the `plimsoll.TrainStep` of your own loop; a file with an error text, a log, a CUDA memory
            snapshot or a recorded watch.
        device: device for a job or a run, see `plimsoll.plan_job`; the job's device by default.
        budget: memory budget for a job or a run, such as ``"2GiB"``; the job's budget by default.
        progress: callback that receives a status text during a dry run.

    Raises:
        RecordError: if the folder is not a run directory, or a file in it is damaged.
        InputError: if the file cannot be read, is a pickle but not a snapshot, or the job cannot be predicted (see
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
    """Return whether a file is a job: a YAML file without ``apiVersion``, which marks Kubernetes manifests."""
    if path.suffix.lower() not in _JOB_SUFFIXES or path.is_dir():
        return False
    with suppress(OSError), path.open("rb") as file:
        return re.search(rb"^apiVersion:", file.read(_HEAD_BYTES), re.MULTILINE) is None
    return True  # it is read as a job later, which raises an error


def is_not_begun(path: Path) -> bool:
    """Return whether a run has not begun: its folder has a job and a plan, but no run record."""
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
    """Return a note if memory ran out but the run continued; otherwise return no notes."""
    phases = [event.phase or "an unknown phase" for event in run.oom_events if event.survived]
    if not phases:
        return ()
    times = "once" if len(phases) == 1 else f"{len(phases):,} times"
    where = ", ".join(dict.fromkeys(phases))
    return (f"Memory ran out {times} ({where}) and the run continued: `plimsoll report` of its directory shows how.",)


def _bytes(budget: str | int | None) -> int | None:
    return None if budget is None else parse_bytes(budget)


def _of_file(path: Path) -> Diagnosis:
    if is_snapshot(path):
        return diagnosis_of_snapshot(path)
    if is_recording(path):
        return diagnosis_of_watch(WatchRecord.read(path))
    if path.suffix == ".py":
        raise InputError(
            f"{path} is a program, not its output: give its output, `python {path} 2>&1 | plimsoll explain`, or use "
            f"`plimsoll lint {path}`, which finds mistakes in it"
        )
    try:
        with path.open("rb") as file:
            return diagnosis_of_text(file, path.name)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): give a file with the text of an error") from None
