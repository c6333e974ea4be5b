"""Recovery training of a smaller model, by running ``plimsoll train``.

The job is the evaluation job, with the smaller model as ``model`` and the original as teacher. It is trained in a
separate process, inside a budget if there is one, and resumes after an interruption.

Does NOT tune the learning rate. The job's own learning-rate schedule is used, and ends with the last step of recovery.
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

_CHECKPOINTS = 4  # per training run: after a kill, at most about a quarter of the steps is repeated


class Trained(NamedTuple):
    """The folder of a trained model, and the cost of its training."""

    folder: Path
    cost: TrainingCost


def train_again(  # noqa: PLR0917 -- called once
    job: Job, source: Source, place: Path, cache: Path, num_steps: int, budget_bytes: int | None, teacher: Path | None
) -> Trained:
    """Train a model, or resume an interrupted training run.

    Args:
        job: the job with the data, the task and the optimizer.
        source: the model to train.
        place: the folder in which ``job.yaml`` and the run directory ``run`` are created.
        cache: the cache folder for the tokenized data of the job.
        num_steps: the total number of steps, including steps before an interruption.
        budget_bytes: the memory budget of the training run's plan; ``None`` to train without a plan.
        teacher: a model folder to distill from; ``None`` to train on labels only.

    Raises:
        InputError: if the training fails.
    """
    run = place / "run"
    write_atomically(place / "job.yaml", _job_of(job, source, num_steps, budget_bytes, teacher).encode())
    if any(RunDirectory(run).checkpoints.glob("step-*")):  # without a checkpoint, a killed run starts again
        arguments = ["--resume"]
    else:
        arguments = [str(place / "job.yaml"), "--cache", str(cache), "--force"]
        arguments += [] if budget_bytes is not None else ["--no-plan"]
    command = [sys.executable, "-m", "plimsoll", "train", *arguments, "--out", str(run), "--json"]
    # If this process ends, the training process must end too: it would block the next command.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=ending_with_this())
    if done.returncode:
        raise InputError(f"{source.folder} cannot be trained ({_why(done.stdout)}): correct this, or set --recover 0")
    return Trained(run / "model", cost_of(RunRecord.from_directory(run), has_teacher=teacher is not None))


def cost_of(record: RunRecord, has_teacher: bool) -> TrainingCost:
    """Return the peak memory and median step time of a run, with a note whether it distilled from a teacher.

    The first step creates optimizer states, so its time is left out unless it is the only step.
    """
    seconds = [step.step_seconds for step in record.steps]
    return TrainingCost(
        peak_bytes=record.peak_bytes,
        step_seconds=median(seconds[1:] or seconds) if seconds else None,
        has_teacher=has_teacher,
    )


def _job_of(job: Job, source: Source, num_steps: int, budget_bytes: int | None, teacher: Path | None) -> str:
    changes: dict[str, Any] = {
        "model": str(Path(source.folder).absolute()),  # the job file is in another folder
        "steps": num_steps,
        "evaluate_every": None,
        "checkpoint": CheckpointPolicy(every=max(num_steps // _CHECKPOINTS, 1), keep=1),
        "budget": Budget(device_bytes=budget_bytes),
    }
    if source.tokenizer is not None:
        changes["tokenizer"] = TokenizerSource(path=str(Path(source.tokenizer).absolute()))
    changes["distill"] = None if teacher is None else DistillSource(teacher=str(teacher.absolute()))
    return json.dumps(job.model_copy(update=changes).model_dump(mode="json", exclude_none=True))  # JSON is valid YAML


def _why(output: str) -> str:
    try:
        message: str = json.loads(output)["message"]
    except (ValueError, KeyError, TypeError):
        return "standard error has the reason"
    return message
