"""Checks of a job that need no torch, so that a typo does not cost seconds. All faults are reported together.

They cover names (of the model, optimizer, techniques and device), files and folders, labels of the data, and a
budget smaller than an empty process. Each check would also fail later, with the same message. Not
covered: values that need a model to check, and whether the training fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from plimsoll.data.quick_facts import labels_seen, require_files
from plimsoll.data.tokens.given_tokenizer import load_tokenizer
from plimsoll.device.cpu.data_limit import MARGIN_BYTES
from plimsoll.device.cuda import nvml
from plimsoll.device.cuda.gpus import find_gpu
from plimsoll.embeddings.opening import dimension_of
from plimsoll.errors import BudgetError, InputError, JobError
from plimsoll.models.names import (
    require_allowed,
    require_labels,
    require_model_fields,
    require_model_name,
    require_optimizer,
    require_technique,
)
from plimsoll.records.job import Job
from plimsoll.records.plan import Pin, parse_pin
from plimsoll.records.units import format_bytes
from plimsoll.step.recovery import samples_of_rank

LEAST_PROCESS_BYTES = 100 << 20
"""Lower bound for the private memory of a process with torch: 154 MiB with Python 3.11 and torch 2.13 for CPUs."""


def require_sound(
    job: Job,
    device: str | None = None,
    limit_bytes: int | None = None,
    pins: Iterable[Pin] = (),
    forbids: Sequence[str] = (),
    *,
    has_data: bool = True,
) -> None:
    """Check a job for all faults that can be found without torch.

    Args:
        job: the training.
        device: see `plimsoll.planning.predict_job.predict_job`, also for ``limit_bytes``.
        limit_bytes: see `device`.
        pins: pins of the plan, in addition to the job's.
        forbids: names of techniques.
        has_data: whether the texts, tokenizer and vectors must exist. False for a job that a program builds itself, or
            whose data have been prepared.

    Raises:
        InputError: for one fault, an error of its type; for several, a `JobError` with a line for each fault.
    """
    names = [*(pin.technique for pin in (*pins, *map(parse_pin, job.pin))), *forbids]
    checks = [
        lambda: require_model_name(job.model, job.task),
        lambda: require_model_fields(job.model),
        *(_checks_of_data(job) if has_data else ()),
        lambda: require_optimizer(job.optimizer, job.steps),
        lambda: require_teacher_folder(job),
        *(lambda name=name: require_technique(name) for name in dict.fromkeys(names)),
        *(lambda name=name: require_allowed(name) for name in job.allow),
        lambda: _require_device(device, job.device),
        lambda: _require_more_than_a_process(job, device, limit_bytes),
    ]
    faults = list(_raised(checks))
    if len(faults) == 1:
        raise faults[0]
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise JobError(f"the job has {len(faults)} faults: correct each of them\n{lines}")


def require_micro_batch(micro_batch: int | None, job: Job) -> None:
    """Check that a micro-batch has at least one sample, and at most the samples that a rank has of each batch.

    Raises:
        InputError: if it has not; the message names the valid range.
    """
    most = samples_of_rank(job)
    if micro_batch is not None and not 1 <= micro_batch <= most:
        of = f", of which each of {job.ranks} ranks has {most}" if job.ranks > 1 else ""
        raise InputError(
            f"--micro-batch {micro_batch} is not a part of the job's batch of {job.batch_size}{of}: give 1 to {most}, "
            f"or change the batch with --set batch_size={max(micro_batch, 1) * job.ranks}"
        )


def require_teacher_folder(job: Job) -> None:
    """Check that the folder of a job's teacher exists, if it has one.

    Raises:
        JobError: if the folder does not exist.
    """
    if job.distill is not None and not (Path(job.distill.teacher) / "config.json").is_file():
        raise JobError(
            f"distill.teacher: there is no model in {job.distill.teacher}: give the folder of a trained model, or "
            "download it first"
        )


def _raised(checks: Iterable[Callable[[], object]]) -> Iterator[InputError]:
    for check in checks:
        try:
            check()
        except InputError as fault:
            yield fault


def _checks_of_data(job: Job) -> Iterator[Callable[[], object]]:
    tokenizer, vectors = job.tokenizer.path, job.embeddings
    yield lambda: _require_texts(job)
    if tokenizer is not None:
        yield lambda: load_tokenizer(Path(tokenizer))
    if vectors is not None:
        yield lambda: dimension_of(vectors)


def _require_texts(job: Job) -> None:
    require_files(job)
    num_labels = labels_seen(job, by_heads=True)
    if job.is_labelled and job.data.label is None and job.task == "classification":  # all folders have been read
        require_labels(job.task, num_labels)


def _require_device(given: str | None, own: str) -> None:
    name = (given or own).lower()
    if name not in {"auto", "local", "cpu", "cuda"} and not name.startswith("cuda:"):
        find_gpu(name)


def _require_more_than_a_process(job: Job, device: str | None, limit_bytes: int | None) -> None:
    """Check that a budget of private memory exceeds the memory of torch alone."""
    name = (device or job.device).lower()
    is_cpu = name == "cpu" or (name in {"auto", "local"} and nvml.driver_version() is None)
    own_bytes = job.budget.device_bytes if is_cpu else job.budget.host_bytes
    budget_bytes = limit_bytes if is_cpu and limit_bytes is not None else own_bytes
    if budget_bytes is not None and budget_bytes < LEAST_PROCESS_BYTES + MARGIN_BYTES:
        raise BudgetError(
            f"a budget of {format_bytes(budget_bytes)} is too small for any training: a process that has only imported "
            f"torch takes more than {format_bytes(LEAST_PROCESS_BYTES)}, and {format_bytes(MARGIN_BYTES)} of the "
            "budget stay free as headroom: give a larger budget, or leave it out to see how much is needed"
        )
