"""Watching the training process from outside: what the kernel kills is explained and started again.

The supervisor holds no tensors and does not import torch. It starts the training in a process group of its own and
hands on SIGINT and SIGTERM, both as SIGTERM: the step is finished and saved, and a second one ends the process wherever
it is. (SIGINT would be a traceback from whatever library is being loaded.) A training process that is killed (SIGKILL
by the kernel's OOM killer, SIGBUS by a full /dev/shm, an abort in a library that could not allocate) is started again
from its last good checkpoint; with the next smaller micro-batch if memory was the cause, with the same if the machine's
own counters say it was not. Three deaths without a checkpoint in between and without a smaller micro-batch end the run.

Does NOT watch other machines (see torchrun's elastic agent).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from plimsoll.device.cgroup import oom_kill_count
from plimsoll.errors import OutOfMemoryError, TornStepError
from plimsoll.records.plan import Plan
from plimsoll.records.run import CheckpointLine, DeathLine
from plimsoll.run.directory import RunDirectory

_MEMORY_SIGNALS = {signal.SIGKILL, signal.SIGBUS, signal.SIGABRT, signal.SIGSEGV}
_STOPPED = {-signal.SIGTERM, 128 + signal.SIGTERM}
_MOST_DEATHS_WITHOUT_PROGRESS = 3
_REMEDIES = {
    True: "give a smaller --budget, which stops it below the machine's own limit, or free memory on the machine",
    False: "stop what kills it",
}


@dataclass(frozen=True, slots=True)
class _Death:
    """How a training process ended that did not end by itself."""

    signal_name: str
    evidence: str
    was_memory: bool


def supervise(directory: RunDirectory, worker_arguments: tuple[str, ...] = (), quiet: bool = False) -> int:
    """Run the training of ``directory`` to its end, through deaths of its process.

    Args:
        directory: the run directory, with its ``job.yaml``, ``plan.json`` and prepared data.
        worker_arguments: further arguments of the first ``plimsoll train-worker``.
        quiet: show no progress.

    Returns:
        the exit code of the training process that ended by itself, 128 + n if signal n asked it to.

    Raises:
        OutOfMemoryError: if it keeps being killed without getting further.
    """
    sizes = Plan.load(directory.plan).micro_batches
    arguments, restarts, fruitless = worker_arguments, 0, 0
    while True:
        kills_before, step_before = oom_kill_count(), _last_saved_step(directory)
        shown = ["--quiet"] if quiet else []
        code = _run_worker(["train-worker", str(directory.path), *arguments, "--restarts", str(restarts), *shown])
        death = _death(code, kills_before)
        if death is None:
            return _exit_code(code)
        restarts += 1
        saved_step = _last_saved_step(directory)
        micro_batch = directory.micro_batch_in_force() or sizes[0]
        smaller = next((size for size in sizes if size < micro_batch), None)
        following = (smaller or micro_batch) if death.was_memory else micro_batch
        fruitless = 0 if saved_step > step_before or following < micro_batch else fruitless + 1
        gives_up = fruitless >= _MOST_DEATHS_WITHOUT_PROGRESS
        _note(directory, death, None if gives_up else saved_step, following)
        if gives_up:
            raise OutOfMemoryError(
                f"the training process was killed ({death.signal_name}) {fruitless} times without getting past step "
                f"{saved_step}, at micro-batch {micro_batch}; {death.evidence}. "
                f"{_REMEDIES[death.was_memory]}; use --resume then"
            )
        # Where memory was not the cause the checkpoint says the micro-batch, and how far it may grow again.
        arguments = ("--resume-newest", *(("--micro-batch", str(following)) if death.was_memory else ()))


def _run_worker(arguments: list[str]) -> int:
    """Run a Plimsoll command in a process of its own; signals that arrive meanwhile are handed on to it.

    Returns:
        its exit code, less than 0 if it was killed; 128 + n if it stopped because signal n was handed on.
    """
    command = [sys.executable, "-m", "plimsoll", *arguments]
    environment = os.environ | {"PLIMSOLL_SUPERVISOR": str(os.getpid())}
    with subprocess.Popen(command, process_group=0, env=environment) as process, _handing_on(process) as received:
        code = process.wait()
    return 128 + received[0] if received and code in _STOPPED else code


def prepare_data(directory: RunDirectory, cache: Path, quiet: bool, again: bool = False) -> int:
    """Index, train the tokenizer and tokenize in a process of its own, whose memory is given back whole.

    Args:
        directory: the run directory, with its ``job.yaml``.
        cache: where the tokens go.
        quiet: show no progress.
        again: it was prepared before, and what comes out must be the same.

    Returns:
        its exit code.

    Raises:
        OutOfMemoryError: if it is killed.
    """
    kills_before = oom_kill_count()
    shown = [*(["--quiet"] if quiet else []), *(["--again"] if again else [])]
    code = _run_worker(["prepare-worker", str(directory.path), str(cache), *shown])
    death = _death(code, kills_before)
    if death is not None:
        raise OutOfMemoryError(
            f"the process that prepares the data in {cache} was killed ({death.signal_name}); {death.evidence}: "
            "free memory on the machine, or give the path of an existing tokenizer"
        )
    return _exit_code(code)


def _exit_code(code: int) -> int:
    """What a shell makes of a return code: that of a process which ended by itself, or 128 and the signal's number."""
    return code if code >= 0 else 128 - code


@contextmanager
def _handing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    received: list[int] = []

    def hand_on(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)
        process.terminate()

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _death(code: int, kills_before: int | None) -> _Death | None:
    """What happened to a process with this return code; ``None`` if it ended by itself."""
    if code == TornStepError.exit_code:
        return _Death(
            "torn step", "memory ran out inside optimizer.step() and only a checkpoint can undo that", was_memory=True
        )
    if code >= 0 or -code not in _MEMORY_SIGNALS:
        return None
    name = signal.Signals(-code).name
    kills = oom_kill_count()
    if -code != signal.SIGKILL:
        return _Death(
            name, "a library stopped the process, as they do when an allocation fails where none may", was_memory=True
        )
    if kills is None or kills_before is None:
        return _Death(name, "no memory cgroup can be read here, so the kernel's OOM killer is assumed", was_memory=True)
    if kills > kills_before:
        return _Death(
            name,
            f"the memory cgroup counts {kills - kills_before} OOM kill(s) more than before: the kernel's OOM killer",
            was_memory=True,
        )
    return _Death(name, "the memory cgroup counts no OOM kill: somebody sent the signal", was_memory=False)


def _note(directory: RunDirectory, death: _Death, restarted_from_step: int | None, following: int) -> None:
    lines = directory.lines()
    last = lines[-1].time_seconds if lines else 0.0
    directory.append(
        DeathLine(
            time_seconds=last,
            signal=death.signal_name,
            evidence=death.evidence,
            restarted_from_step=restarted_from_step,
            next_micro_batch=following,
        )
    )
    then = (
        "giving up"
        if restarted_from_step is None
        else f"going on from step {restarted_from_step} with micro-batch {following}"
    )
    print(f"training process killed ({death.signal_name}): {death.evidence}; {then}", file=sys.stderr)


def _last_saved_step(directory: RunDirectory) -> int:
    return max((line.step for line in directory.lines() if isinstance(line, CheckpointLine)), default=0)
