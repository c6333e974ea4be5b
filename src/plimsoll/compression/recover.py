"""The training that gives back what a smaller model has lost: ``plimsoll train``, as anybody would call it.

The job is the one that the model is judged by, with the smaller model as its ``model`` and the original as its teacher.
It is trained in a process of its own, inside a budget where there is one, and goes on where it was stopped.

Does NOT look for a better learning rate, and keeps the job's own schedule, whose end is then the last of these steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from plimsoll.compression.worker import Source
from plimsoll.errors import InputError
from plimsoll.processes.children import ending_with_this
from plimsoll.records.base import write_atomically
from plimsoll.records.device import Budget
from plimsoll.records.distill import DistillSource
from plimsoll.records.job import CheckpointPolicy, Job, TokenizerSource
from plimsoll.records.run import RunRecord
from plimsoll.records.shrink import TrainingCost
from plimsoll.training.run_directory import RunDirectory

_CHECKPOINTS = 4  # of a training, so that little is done twice after a kill


class Trained(NamedTuple):
    """The folder of a model that was trained, and what it took."""

    folder: Path
    cost: TrainingCost


def train_again(  # noqa: PLR0917 -- one call
    job: Job, source: Source, place: Path, cache: Path, num_steps: int, budget_bytes: int | None, teacher: Path | None
) -> Trained:
    """Train a model, or go on with its training.

    Args:
        job: its data, its task and its optimizer.
        source: the model that is trained.
        place: where the run is kept.
        cache: of the job's tokens.
        num_steps: in all.
        budget_bytes: of the training, which is then planned; ``None`` for none.
        teacher: whose answers it follows too.

    Raises:
        InputError: if it cannot be trained.
    """
    run = place / "run"
    write_atomically(place / "job.yaml", _job_of(job, source, num_steps, budget_bytes, teacher).encode())
    if any(RunDirectory(run).checkpoints.glob("step-*")):  # one that was killed before the first is begun anew
        arguments = ["--resume"]
    else:
        arguments = [str(place / "job.yaml"), "--cache", str(cache), "--force"]
        arguments += [] if budget_bytes is not None else ["--no-plan"]
    command = [sys.executable, "-m", "plimsoll", "train", *arguments, "--out", str(run), "--json"]
    # What went on without this process would be in the way of the next command.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=ending_with_this())
    if done.returncode:
        raise InputError(f"{source.folder} cannot be trained ({_why(done.stdout)}): set --recover 0, or correct that")
    return Trained(run / "model", cost_of(RunRecord.from_directory(run), has_teacher=teacher is not None))


def cost_of(record: RunRecord, has_teacher: bool) -> TrainingCost:
    """Return what the steps of a run took; the first one, which makes states, counts where there is no other."""
    seconds = [step.step_seconds for step in record.steps]
    return TrainingCost(
        peak_bytes=record.peak_bytes,
        step_seconds=median(seconds[1:] or seconds) if seconds else None,
        has_teacher=has_teacher,
    )


def _job_of(job: Job, source: Source, num_steps: int, budget_bytes: int | None, teacher: Path | None) -> str:
    changes: dict[str, Any] = {
        "model": str(Path(source.folder).absolute()),  # a job's paths may be taken from where it lies
        "steps": num_steps,
        "evaluate_every": None,
        "checkpoint": CheckpointPolicy(every=max(num_steps // _CHECKPOINTS, 1), keep=1),
        "budget": Budget(device_bytes=budget_bytes),
    }
    if source.tokenizer is not None:
        changes["tokenizer"] = TokenizerSource(path=str(Path(source.tokenizer).absolute()))
    changes["distill"] = None if teacher is None else DistillSource(teacher=str(teacher.absolute()))
    return json.dumps(job.model_copy(update=changes).model_dump(mode="json", exclude_none=True))  # which is YAML too


def _why(output: str) -> str:
    try:
        message: str = json.loads(output)["message"]
    except (ValueError, KeyError, TypeError):
        return "standard error has the reason"
    return message
