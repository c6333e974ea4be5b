"""The training step of a job. Runs, dry runs and benchmarks construct it here, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from plimsoll.device.base import Backend
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.distributed.ranks import Ranks
from plimsoll.models.build import loss_of
from plimsoll.models.optimizers import build_schedule
from plimsoll.models.workload import LossFunction
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Configuration
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep


def step_of(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    fallbacks: Sequence[Configuration | Sequence[Choice]],
    *,
    loss: LossFunction | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    full_length: int | None = None,
    backend: Backend | None = None,
    position: Position | None = None,
    files: MappedPool | None = None,
    ranks: Ranks | None = None,
) -> TrainStep:
    """Construct the step that a job describes.

    Args:
        job: the job, which gives task, clipping, schedule and precision (``auto`` means fp32, which the plan's choices
            change).
        model: the model of the job.
        optimizer: the optimizer of the model.
        fallbacks: see `TrainStep`.
        loss: replaces the loss of the task, for training with a teacher.
        schedule: an existing learning-rate schedule; by default it is built from the job.
        full_length: tokens of the longest sample in the data set; by default the job's ``sequence_length``.
        backend: see `TrainStep`.
        position: see `TrainStep`.
        files: see `TrainStep`.
        ranks: see `TrainStep`.
    """
    own_loss, units = loss_of(job.task)
    return TrainStep(
        model,
        optimizer,
        loss or own_loss,
        units=units,
        fallbacks=fallbacks,
        clip_norm=job.optimizer.clip_norm,
        schedule=schedule or build_schedule(job.optimizer, optimizer, job.steps),
        precision=job.own_precision,
        recut_batch_norm="recut_batch_norm" in job.allow,
        recut_loss="recut_loss" in job.allow,
        full_length=full_length or job.sequence_length,
        backend=backend,
        position=position,
        files=files,
        ranks=ranks,
    )


def subject_of(job: Job, precision: str) -> str:
    """Describe the training of a job in one line."""
    model = job.model if isinstance(job.model, str) else job.model.get("architecture", "model")
    shared = f", shared by {job.ranks} ranks" if job.ranks > 1 else ""
    return f"{model}, {job.task}, {job.batch_size} x {job.sequence_length} tokens a step, {precision}{shared}"
