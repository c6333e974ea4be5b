"""The diagnosis of a job before it runs, and of a run that ended because memory ran out. Both use a dry run.

The parts of the peak are predicted (`plimsoll.planning.remedies`), and the predictor tries every remedy on this
training. The dry run of a finished run uses the choices that were in force at its end. If these choices are predicted
to fit, the parts of the peak do not explain why the run ended, and a note states this.

Not handled: the padding of a job that has not run, because its texts are not prepared.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from plimsoll.data.inspect import inspect_corpus
from plimsoll.data.quick_facts import TextSketch, texts_of
from plimsoll.diagnose.evidence import Evidence, ended_in_oom, evidence_of_run, with_prediction
from plimsoll.diagnose.findings import diagnosed
from plimsoll.errors import PlimsollError
from plimsoll.planning.calibration import known_calibration
from plimsoll.planning.plan import Progress
from plimsoll.planning.remedies import choices_in_force, find_remedies
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared
from plimsoll.records.run import RunRecord
from plimsoll.records.units import format_bytes

_FITS = "It fits as it is, so no remedies were tried: add `--budget SIZE` to find remedies for less memory."


def diagnosis_of_job(
    job: Job,
    subject: str,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Predict the memory of a job, and find remedies if it does not fit.

    Args:
        job: the job.
        subject: name of the job in the diagnosis.
        device: see `plimsoll.planning.plan.plan_job`.
        limit_bytes: see `plimsoll.planning.plan.plan_job`.
        progress: callback that receives a status text.

    Raises:
        InputError: if the job cannot be predicted; see `plimsoll.planning.plan.plan_job`.
    """
    found = find_remedies(
        job, device=device, limit_bytes=limit_bytes, calibration=known_calibration(), progress=progress
    )
    prediction = found.prediction
    has_run_out = not prediction.fits
    evidence = Evidence(subject=subject, kind=prediction.device_kind, has_run_out=has_run_out)
    evidence = with_prediction(evidence, prediction, vocab_size=found.vocab_size, remedies=found.remedies)
    return diagnosed(evidence, (_FITS,) if prediction.verdict == "fits" else found.notes)


def diagnosis_of_run(
    run: RunRecord,
    directory: Path,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Explain why memory ran out in a run, or would run out within `limit_bytes`, and find remedies.

    Args:
        run: the record of the run.
        directory: the run directory.
        device: see `diagnosis_of_job`.
        limit_bytes: see `diagnosis_of_job`.
        progress: see `diagnosis_of_job`.
    """
    evidence = evidence_of_run(run)
    try:
        found = find_remedies(
            Job.from_yaml(directory / "job.yaml"),
            device=device,
            limit_bytes=limit_bytes,
            in_force=choices_in_force(run.plan, *_last(run)),
            calibration=known_calibration(),
            progress=progress,
            texts=_texts(directory),
        )
    except PlimsollError as error:
        if device is not None or limit_bytes is not None:
            raise  # the requested device or limit is impossible
        return diagnosed(evidence, (f"Remedies could not be predicted: {error}",))
    prediction, notes = found.prediction, found.notes
    is_over = prediction.verdict != "fits"
    if not is_over and not evidence.has_run_out:
        notes = (_FITS,)
    elif not is_over:
        notes = (
            f"The training should need at most {format_bytes(prediction.peak.high_bytes)} of "
            f"{format_bytes(prediction.limit_bytes)}: something that grew, or that only this run has, used the rest.",
            *notes,
        )
    seen = with_prediction(
        replace(evidence, has_run_out=is_over),
        prediction,
        vocab_size=found.vocab_size,
        remedies=found.remedies,
        padding_share=_padding_share(directory),
    )
    return diagnosed(seen, notes)


def _texts(directory: Path) -> TextSketch | None:
    """Return facts about the prepared texts of a run, such as their lengths; ``None`` if they cannot be read."""
    try:
        return texts_of(Prepared.load(directory / "prepared.json"))
    except PlimsollError:
        return None


def _last(run: RunRecord) -> tuple[int | None, int | None]:
    """Return the fallback number and the micro-batch (in samples) that were in use at the end of a run.

    Each is ``None`` if the record of the run does not contain it.
    """
    event = next(reversed(run.oom_events), None)
    if event is not None and ended_in_oom(run):
        return event.fallback, event.micro_batch
    step = next(reversed(run.steps), None)
    return (step.fallback, step.micro_batch) if step is not None else (None, None)


def _padding_share(directory: Path) -> float | None:
    """Return the average share of the tokens in a run's batches that are padding.

    ``None`` if the batches are not padded, or the prepared tokens were deleted or cannot be read.
    """
    try:
        job = Job.from_yaml(directory / "job.yaml")
        if not (job.is_labelled or job.data.has_padding):
            return None
        prepared = Prepared.load(directory / "prepared.json")
        if prepared.train.tokens_folder is None or not Path(prepared.train.tokens_folder).is_dir():
            return None
        inspection = inspect_corpus(job, Path(prepared.train.index_folder).parent)
    except PlimsollError:
        return None
    return next((filling.padding_share for filling in inspection.fillings if filling.is_this_job), None)
