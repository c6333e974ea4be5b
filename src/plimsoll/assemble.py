"""From a job and its prepared data to live objects: the model, the optimizer, the loss and the loaders.

Covers everything a run and a prediction need to have in common, so that both look at the same training. Does NOT move
anything to a device it was not asked for, and does not train.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from plimsoll.data.loader import Loader
from plimsoll.data.prepare import Prepared, open_datasets
from plimsoll.errors import BudgetError, JobError
from plimsoll.models.build import build_model, loss_of, sketch_model
from plimsoll.optimizers import build_optimizer, build_schedule
from plimsoll.records.job import Job
from plimsoll.records.units import format_bytes
from plimsoll.workload import LossFunction, Units, resident_bytes

_LONGEST_ENTRY = 100  # characters of a fingerprint's entry


@dataclass(slots=True)
class Assembled:
    """One training, ready to run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    loss: LossFunction
    units: Units
    loader: Loader
    validation: Any | None


def choose_device(job: Job) -> str:
    """The device the job names; ``auto`` is CUDA where there is one."""
    if job.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return job.device


def assemble(job: Job, prepared: Prepared, device: str) -> Assembled:
    """Build the training of ``job`` on ``device``, seeded by the job.

    Raises:
        JobError: if the model or the optimizer cannot be built as described.
        DataError: if there are fewer samples than one batch.
    """
    _seed(job.seed)
    training, validation = open_datasets(prepared, job)
    loader = Loader(training, job.batch_size, job.seed)
    model = build_model(job, prepared.vocab_size, prepared.num_labels, prepared.end_id).to(device)
    model.train()
    _require_kernels(model, job.own_precision, device)
    optimizer = build_optimizer(job.optimizer, model.parameters())
    loss, units = loss_of(job.task)
    return Assembled(
        model, optimizer, build_schedule(job.optimizer, optimizer, job.steps), loss, units, loader, validation
    )


def require_buildable(job: Job) -> None:
    """Check, before the data are prepared, that the model and the optimizer can be built; nothing is allocated.

    Raises:
        JobError: if one cannot, as far as that does not depend on the data (see `sketch_model`).
    """
    model = sketch_model(job)
    if model is not None:
        _require_kernels(model, job.own_precision, choose_device(job))
    optimizer = build_optimizer(job.optimizer, [nn.Parameter(torch.zeros(()))])
    build_schedule(job.optimizer, optimizer, job.steps)


def _seed(seed: int) -> None:
    """Seed every generator whose state a checkpoint keeps."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _require_kernels(model: nn.Module, precision: str, device: str) -> None:
    if device == "cpu" and precision == "fp16" and any(isinstance(module, nn.RNNBase) for module in model.modules()):
        raise JobError(
            f"precision: {precision}: torch has no float16 kernels of recurrent nets for the CPU; use bf16 or fp32"
        )


def require_room(job: Job, prepared: Prepared, baseline_bytes: Callable[[], int], budget_bytes: int) -> None:
    """Check, on the meta device, that the budget can hold what is there before the first activation.

    Args:
        job: the job.
        prepared: its data, for the size of the vocabulary.
        baseline_bytes: the backend's; what is there without a training, asked once a model has been built.
        budget_bytes: the limit of the device.

    Raises:
        BudgetError: if it cannot; it says how much is needed.
    """
    model = build_model(job, prepared.vocab_size, prepared.num_labels, prepared.end_id, device="meta")
    resident = resident_bytes(model, job.optimizer)
    parts = {"process and libraries": baseline_bytes()} | {
        name.replace("_", " "): size or 0 for name, size in resident.items()
    }
    need_bytes = sum(parts.values())
    if need_bytes > budget_bytes:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        raise BudgetError(
            f"a budget of {format_bytes(budget_bytes)} cannot hold this training: before the first activation "
            f"{format_bytes(need_bytes)} are needed ({listed}); give a budget well above that, or a smaller model"
        )


def fingerprint(job: Job, prepared: Prepared) -> dict[str, str]:
    """What must be equal for a checkpoint to belong to a job: everything that changes what is learned.

    The budget, how often is saved and how long is trained may change between a checkpoint and its resume; the length
    may not where the learning rate follows it. Each field has an entry of its own, so that a difference can be named.
    """
    facts = job.model_dump(
        mode="json", exclude={"budget", "checkpoint", "steps", "evaluate_every", "device", "data", "tokenizer"}
    )
    if job.optimizer.schedule != "constant":
        facts["steps"] = job.steps
    return dict(_entries(facts)) | {"data": prepared.key}


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value of every field; what is long is hashed."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _entries(item, f"{name}.{inner}" if name else str(inner))
        return
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    is_long = len(text) > _LONGEST_ENTRY
    yield name, f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:12]}" if is_long else text
