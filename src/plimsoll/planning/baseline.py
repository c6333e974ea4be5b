"""The baseline of a process: its memory before a model exists, for the training of a job or for inference.

    with baseline_for(job, device, load_training) as started:   # before anything else
        ...                                                     # meanwhile
        started.wait()

A prediction on the CPU starts from the baseline. It is measured in a process that has only loaded the libraries of the
training process and started the same threads. This process is a fork of the current process, made before the current
process computes anything, or a new process. `plimsoll.training.baseline` loads these libraries. A caller that may fork
passes its function ``load_training``.
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
"""Loads everything that a training process of a job loads before the model."""

_BASELINE_SPREAD = 0.03  # relative error of a baseline: libraries load code and start threads on demand


def job_baseline(job: Job) -> Estimate:
    """Measure the baseline of a job's training process in a new process.

    Raises:
        DeviceError: if the process cannot be started.
    """
    with cached_baseline(job, lambda: StartedBaseline(job)) as started:
        return started.wait()


@contextmanager
def baseline_for(job: Job, device: str | None, load_training: LoadTraining | None) -> Iterator[Baseline | None]:
    """Load the libraries of the training, and measure their memory in a fork of this process while the block runs.

    Call this before anything else is loaded, so that this process resembles the training process. If this process
    cannot be forked, a new process is started. If the baseline is cached, nothing is loaded.

    Args:
        job: the job of the training.
        device: see `plimsoll.planning.plan.plan_job`. For a GPU, nothing is loaded or measured, and ``None`` is
            yielded.
        load_training: loads the libraries before the fork; with ``None``, a new process is started without a fork.

    Raises:
        JobError: if the job's model does not exist.
    """
    if not _is_cpu(job, device):
        yield None
        return
    with cached_baseline(job, lambda: begin_baseline(job, load_training)) as started:
        yield started


def begin_baseline(job: Job, load_training: LoadTraining | None) -> ForkedBaseline | StartedBaseline:
    """Load the libraries of the training and fork this process, or start a new process if it cannot be forked."""
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
    """A `Baseline` measured in a fork of this process, which has loaded the libraries but has computed nothing yet."""

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
        """Return the baseline, after waiting for it the first time.

        Raises:
            DeviceError: if the process ended without reporting its memory.
        """
        if self._answer is None:
            try:
                self._answer = measured(self._receiving.recv())
            except EOFError:
                self._child.join()
                raise _not_started(self._child.exitcode, "no message") from None
        return self._answer


def _send_baseline(sending: Connection, job: Job, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the parent, which ends this process
    end_with(parent)
    sending.send(baseline_bytes(job))


@final
class StartedBaseline:
    """A `Baseline` measured in a new process.

    Args:
        job: the job of the training, passed on standard input.
        arguments: command line of the process.
    """

    def __init__(self, job: Job | None, arguments: Sequence[str] = ("baseline-worker",)) -> None:
        command = [sys.executable, "-m", "plimsoll", *arguments]
        pipe = subprocess.PIPE
        environment = os.environ | {SUPERVISOR: str(os.getpid())}  # the process ends with this one
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        assert self._child.stdin is not None
        if job is not None:
            self._child.stdin.write(job.to_json())  # fits into the buffer of a pipe
        self._child.stdin.close()
        self._child.stdin = None
        self._answer: Estimate | None = None

    @classmethod
    def of_inference(cls, folder: Path, task: str) -> StartedBaseline:
        """Start a process that loads everything for inference except the model."""
        return cls(None, ("inference-baseline-worker", str(folder), task))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.returncode is None:
            self._child.kill()
            self._child.communicate()

    def wait(self) -> Estimate:
        """Return the baseline, after waiting for it the first time; see `Baseline`."""
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
        f"cannot start a process to measure its memory without a model (exit {exit_code}: {why}): check that "
        f"{sys.executable} runs"
    )


def load_model_code(job: Job) -> None:
    """Import the code of the job's model.

    A user's function is also called, on the meta device, because it may import more modules.

    Raises:
        JobError: if the job's model does not exist.
    """
    _load_model_code(job.to_json())


@cache
def _load_model_code(job_text: str) -> None:
    from plimsoll.models.build import build_model, sketch_model

    job = Job.from_json(job_text)
    if sketch_model(job) is None:
        with suppress(JobError):  # a later trace reports the error
            build_model(job, job.tokenizer.vocab_size, 2 if job.is_labelled else None, 0, device="meta")


def baseline_bytes(job: Job) -> int:
    """Return the private bytes of this process, which has loaded the training's libraries, with all threads started."""
    from plimsoll.planning.dry_run.ranks import joined_alone, threads_of_rank

    backend = backend_for("cpu")
    with threads_of_rank(job.ranks), joined_alone() if job.ranks > 1 else nullcontext():
        backend.baseline_bytes()  # starts the thread pools
        return backend.use().used_bytes


def print_inference_baseline(folder: Path, task: str) -> None:
    """Print the private bytes of a process that has loaded everything for inference except the weights."""
    begin_worker()
    from plimsoll.inference import (
        apply,  # noqa: F401
        placement,  # noqa: F401
    )
    from plimsoll.inference.dry_run import Applied
    from plimsoll.inference.model import ModelFolder, tokenizer_of

    Applied.open(folder, task, None, 0)
    with suppress(DataError):  # a user's program may have another tokenizer
        tokenizer_of(ModelFolder(folder, None), None).read(["Its threads are started.", "They take memory too."])
    backend = backend_for("cpu")
    backend.baseline_bytes()  # starts the thread pools
    print(backend.use().used_bytes)


def load_libraries(job: Job) -> None:
    """Import the libraries of the job before memory is limited and counted."""
    leave_out_unused(job)
    import torch._dynamo  # noqa: F401  -- torch.optim imports it at the first step otherwise

    from plimsoll.models.build import import_library_of

    if job.data.on_the_fly:  # used to read texts during evaluation, and in training without worker processes
        import pyarrow  # noqa: F401
        import tokenizers  # noqa: F401
    import_library_of(job)


def measured(private_bytes: int) -> Estimate:
    """Return the estimate for measured private bytes of a process without a model."""
    return Estimate(
        likely_bytes=private_bytes,
        low_bytes=int(private_bytes * (1 - _BASELINE_SPREAD)),
        high_bytes=int(private_bytes * (1 + _BASELINE_SPREAD)),
        measured_bytes=private_bytes,
    )
