"""Start Plimsoll commands as child processes, forward signals to them, and wait for their end.

    with loading_once(directory):
        end = run_worker(["train-worker", "runs/a"])

Inside the block, processes are forked from a server that has imported the libraries
(`plimsoll.processes.fork_server`). Outside the block, for ranks, and if forking is impossible, a new interpreter is
started. Does NOT explain why a process ended: see `plimsoll.training.supervise`. Does not import torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

from plimsoll.device.aborts import SUPERVISORS_FILE
from plimsoll.errors import FragmentedHeapError, RankLostError, TornStepError
from plimsoll.files.temporary import own_prefix, remove_leftovers
from plimsoll.processes.children import SUPERVISOR
from plimsoll.processes.fork_server import ForkServer, serve
from plimsoll.processes.timings import timed
from plimsoll.records.job import Job
from plimsoll.report.progress import spinner
from plimsoll.training.run_directory import RunDirectory

UNFINISHED = {128 + signal.SIGTERM, TornStepError.exit_code, FragmentedHeapError.exit_code, RankLostError.exit_code}
"""Exit codes of a process that ended before it had finished."""

_SERVERS: list[ForkServer] = []  # the server of the current block of `loading_once`


class End(NamedTuple):
    """The way in which a process ended.

    Args:
        return_code: the exit code of the process, or -n if signal n killed it.
        asked_by: the number of the first signal that was forwarded to the process, if any.
        fault: the output of `faulthandler` if native code crashed.
    """

    return_code: int
    asked_by: int | None
    fault: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would show: the code of the process, or 128 plus the signal number."""
        has_not_ended_by_itself = self.return_code < 0 or self.return_code in UNFINISHED
        if self.asked_by is not None and has_not_ended_by_itself:
            return 128 + self.asked_by
        return self.return_code if self.return_code >= 0 else 128 - self.return_code


class _CanEnd(Protocol):
    def terminate(self) -> None:
        """Ask the process to end."""


class _Process(_CanEnd, Protocol):
    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code, or -n if signal n killed it."""


class _Signals:
    """Received signals, which are forwarded to the current child process, also if they arrived before its start."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: _CanEnd | None = None

    def to(self, process: _CanEnd) -> None:
        self._process = process
        for _ in self.received:
            process.terminate()

    def note(self, signal_number: int, _frame: FrameType | None) -> None:
        self.received.append(signal_number)
        if self._process is not None:
            self._process.terminate()


@contextmanager
def _handing_on() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_worker(arguments: list[str]) -> End:
    """Run a Plimsoll command in a child process, and forward signals to it.

    Args:
        arguments: the command and its arguments.
    """
    with tempfile.NamedTemporaryFile("r", prefix=own_prefix(), errors="replace") as faults, _handing_on() as signals:
        process = _started(arguments, {SUPERVISOR: str(os.getpid()), SUPERVISORS_FILE: faults.name}, signals)
        signals.to(process)
        return_code = process.wait()
        fault = faults.read()
    remove_leftovers()
    if fault:
        print(fault, file=sys.stderr)
    return End(return_code, signals.received[0] if signals.received else None, fault)


def _started(arguments: list[str], variables: dict[str, str], signals: _Signals) -> _Process:
    """Start a Plimsoll command: fork it from the server if possible, otherwise start a new interpreter."""
    server = None if arguments[0] == "launch-worker" else next(iter(_SERVERS), None)
    if server is not None:
        signals.to(server)  # the server may still be importing for seconds
        with spinner("--quiet" in arguments):
            process = server.fork(arguments, variables)
        if process is not None:
            return process
    command = [sys.executable, "-m", "plimsoll", *arguments]
    return subprocess.Popen(command, process_group=0, env=os.environ | variables)


@contextmanager
def loading_once(directory: RunDirectory) -> Iterator[None]:
    """Import the libraries of a run only once: inside the block, its processes are forked from a server.

    The server costs about 35 MiB: it keeps its own copy of each page that a child has modified (copy-on-write).

    Args:
        directory: the run directory, with its ``job.yaml``.
    """
    with ForkServer([sys.executable, "-m", "plimsoll", "fork-server", str(directory.job)]) as server:
        _SERVERS.append(server)
        try:
            yield
        finally:
            _SERVERS.clear()


def forked_as(job_file: Path) -> list[str]:
    """Import the libraries that the processes of a run need, and serve forks of this process.

    Import errors are ignored here, because the process that needs the library reports them.

    Args:
        job_file: the ``job.yaml`` of the run.

    Returns:
        In each forked process, the command-line arguments of that process.
    """
    from plimsoll.planning.lean_imports import leave_out_unused
    from plimsoll.training.baseline import load_training

    # Forked processes read the job file again, because it may be rewritten while this server waits.
    job = Job.from_yaml(job_file)
    leave_out_unused(job)
    from plimsoll.step.oom_boundary import without_fail  # imports torch, without the parts that the job does not use

    with timed("loading"):
        without_fail(lambda: load_training(job))
    return serve()


def end_server() -> None:
    """End the server of `loading_once`, if any, to free its memory; later processes start a new interpreter."""
    for server in _SERVERS:
        server.terminate()
    _SERVERS.clear()
