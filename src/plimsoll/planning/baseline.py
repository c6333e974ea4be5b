"""What a process takes before it has a model: of a training of a job, and of applying a model.

    with baseline_for(job, device, load_training) as started:   # first of all
        ...                                                     # meanwhile
        started.wait()

A prediction on the CPU counts from it. It is measured in a process that has loaded what the training process loads and
started its threads, and nothing else: a fork of this one before it does anything, or one that is started anew. What
the training process loads is in `plimsoll.training.baseline`; who may fork hands it in.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self, final

from plimsoll.device.base import backend_for
from plimsoll.errors import DataError, DeviceError, InputError, JobError
from plimsoll.planning.cached_baseline import Baseline, cached_baseline
from plimsoll.planning.lean_imports import leave_out_unused
from plimsoll.processes.children import SUPERVISOR, begin_worker, end_with, uninterrupted
from plimsoll.processes.fork_server import can_fork
from plimsoll.records.job import Job
from plimsoll.records.prediction import Estimate

LoadTraining = Callable[[Job], None]
"""Loads what a training process of a job has before it has a model."""

_BASELINE_SPREAD = 0.03  # of the process before there is a model: libraries load and start threads as they are used


def job_baseline(job: Job) -> Estimate:
    """Read what a training process of a job takes before it has a model, from one that is started for it.

    Raises:
        DeviceError: if it cannot be started.
    """
    with cached_baseline(job, lambda: StartedBaseline(job)) as started:
        return started.wait()


@contextmanager
def baseline_for(job: Job, device: str | None, load_training: LoadTraining | None) -> Iterator[Baseline | None]:
    """Load what the training needs, and have a fork of this process say what that takes, while the block runs.

    Call it before anything else is loaded: what this process is now is what the training process will be. Where it
    cannot be forked, another one is started; where the answer is known, nothing is loaded.

    Args:
        job: of the training.
        device: see `plimsoll.planning.plan.plan_job`; of a GPU there is nothing to read, and nothing is loaded:
            ``None``.
        load_training: what to load, which is what will be forked; ``None`` to start another process in any case.

    Raises:
        JobError: if there is no such model.
    """
    if not _is_cpu(job, device):
        yield None
        return
    with cached_baseline(job, lambda: begin_baseline(job, load_training)) as started:
        yield started


def begin_baseline(job: Job, load_training: LoadTraining | None) -> ForkedBaseline | StartedBaseline:
    """Load what the training needs, and fork this process, or start another where that cannot be."""
    if load_training is None:
        return StartedBaseline(job)
    load_training(job)
    return ForkedBaseline(job) if can_fork() else StartedBaseline(job)


def _is_cpu(job: Job, device: str | None) -> bool:
    if device is not None and device.lower() not in {"cpu", "local"}:
        return False
    from plimsoll.models.assemble import choose_device

    given = {} if device is None else {"device": "auto" if device.lower() == "local" else "cpu"}
    return choose_device(job.model_copy(update=given)) == "cpu"


@final
class ForkedBaseline:
    """`Baseline`: a fork of this process, which has loaded the training of the job and does not compute yet."""

    def __init__(self, job: Job) -> None:
        context = get_context("fork")
        self._receiving, sending = context.Pipe(duplex=False)
        self._child = context.Process(target=_send_baseline, args=(sending, job, os.getpid()), daemon=True)
        with uninterrupted():
            self._child.start()
        sending.close()
        self._answer: Estimate | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.join()

    def wait(self) -> Estimate:
        """Wait for its answer, which is the same each time.

        Raises:
            DeviceError: if it ended without one.
        """
        if self._answer is None:
            try:
                self._answer = measured(self._receiving.recv())
            except EOFError:
                self._child.join()
                raise _not_started(self._child.exitcode, "no message") from None
        return self._answer


def _send_baseline(sending: Connection, job: Job, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends this process
    end_with(parent)
    sending.send(baseline_bytes(job))


@final
class StartedBaseline:
    """`Baseline`: a process that is started anew.

    Args:
        job: of the training.
        arguments: of the process that is started; the job comes to it on standard input.
    """

    def __init__(self, job: Job | None, arguments: Sequence[str] = ("baseline-worker",)) -> None:
        command = [sys.executable, "-m", "plimsoll", *arguments]
        pipe = subprocess.PIPE
        environment = os.environ | {SUPERVISOR: str(os.getpid())}  # which it does not outlive
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        assert self._child.stdin is not None
        if job is not None:
            self._child.stdin.write(job.to_json())  # which is less than a pipe holds
        self._child.stdin.close()
        self._child.stdin = None
        self._answer: Estimate | None = None

    @classmethod
    def of_inference(cls, folder: Path, task: str) -> StartedBaseline:
        """Start one that has all that applying a model takes but the model."""
        return cls(None, ("inference-baseline-worker", str(folder), task))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.returncode is None:
            self._child.kill()
            self._child.communicate()

    def wait(self) -> Estimate:
        """Wait for its answer; see `Baseline`."""
        if self._answer is not None:
            return self._answer
        output, errors = self._child.communicate()
        if self._child.returncode == InputError.exit_code and (refusal := InputError.said_by(errors)):
            raise refusal
        if self._child.returncode != 0:
            last = errors.strip().splitlines()[-1:] or ["no message"]
            raise _not_started(self._child.returncode, last[0])
        self._answer = measured(int(output))
        return self._answer


def _not_started(exit_code: int | None, why: str) -> DeviceError:
    return DeviceError(
        f"cannot start a process to see what it takes before it has a model (exit {exit_code}: {why}): check that "
        f"{sys.executable} runs"
    )


def load_model_code(job: Job) -> None:
    """Import what the model is made of: also a function of the user's, which a sketch does not call, may import more.

    Raises:
        JobError: if there is no such model.
    """
    _load_model_code(job.to_json())


@cache
def _load_model_code(job_text: str) -> None:
    from plimsoll.models.build import build_model, sketch_model

    job = Job.from_json(job_text)
    if sketch_model(job) is None:
        with suppress(JobError):  # who traces it says what is wrong with it
            build_model(job, job.tokenizer.vocab_size, 2 if job.is_labelled else None, 0, device="meta")


def baseline_bytes(job: Job) -> int:
    """Count what this process takes, which has loaded the training of the job, with the threads that it starts."""
    from plimsoll.planning.dry_run.ranks import joined_alone, threads_of_rank

    backend = backend_for("cpu")
    with threads_of_rank(job.ranks), joined_alone() if job.ranks > 1 else nullcontext():
        backend.baseline_bytes()  # starts the thread pools
        return backend.use().used_bytes


def print_inference_baseline(folder: Path, task: str) -> None:
    """Print how many bytes a process takes that has all that applying a model needs, but the weights."""
    begin_worker()
    from plimsoll.inference import (
        apply,  # noqa: F401
        placement,  # noqa: F401
    )
    from plimsoll.inference.dry_run import Applied
    from plimsoll.inference.model import ModelFolder, tokenizer_of

    Applied.open(folder, task, None, 0)
    with suppress(DataError):  # a program of one's own may have another tokenizer
        tokenizer_of(ModelFolder(folder, None), None).read(["Its threads are started.", "They take memory too."])
    backend = backend_for("cpu")
    backend.baseline_bytes()  # starts the thread pools
    print(backend.use().used_bytes)


def load_libraries(job: Job) -> None:
    """Import what the job needs before memory is limited and counted."""
    leave_out_unused(job)
    import torch._dynamo  # noqa: F401  -- torch.optim imports it at the first step otherwise

    from plimsoll.models.build import import_library_of

    if job.data.on_the_fly:  # what reads the texts, in evaluations and where no worker is left
        import pyarrow  # noqa: F401
        import tokenizers  # noqa: F401
    import_library_of(job)


def measured(private_bytes: int) -> Estimate:
    """Make the estimate of what a process was seen to take before it had a model."""
    return Estimate(
        likely_bytes=private_bytes,
        low_bytes=int(private_bytes * (1 - _BASELINE_SPREAD)),
        high_bytes=int(private_bytes * (1 + _BASELINE_SPREAD)),
        measured_bytes=private_bytes,
    )
