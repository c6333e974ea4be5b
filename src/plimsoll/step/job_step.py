"""The training step of a job: a run, its dry run and the benchmarks make the same one, so that none can drift."""

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
    """Make the step that a job describes.

    Args:
        job: its task, precision (``auto`` is fp32: a plan's choices change it), clipping and schedule are read.
        model: its model.
        optimizer: its optimizer.
        fallbacks: see `TrainStep`.
        loss: with a teacher; by default the task's own.
        schedule: its schedule where there is one already; by default it is made.
        full_length: the tokens of the longest row there will be; by default those of the job's ``sequence_length``.
        backend: see `TrainStep`, as is ``position``.
        position: see `backend`.
        files: see `backend`.
        ranks: see `backend`.
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
    """Say in a line what a job trains."""
    model = job.model if isinstance(job.model, str) else job.model.get("architecture", "model")
    shared = f", shared by {job.ranks} ranks" if job.ranks > 1 else ""
    return f"{model}, {job.task}, {job.batch_size} x {job.sequence_length} tokens a step, {precision}{shared}"
