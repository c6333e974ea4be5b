"""The processes of a run, of which each is a Plimsoll command: started, told of signals, waited for.

    with loading_once(directory):
        end = run_worker(["train-worker", "runs/a"])

Inside the block they are forked from one process that has loaded what they need (`plimsoll.processes.fork_server`);
outside, where nothing can be forked, and as ranks, they are started anew. Does NOT judge how one ended, see
`plimsoll.training.supervise`. Does not import torch.
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
"""Codes of a process that was ended before it was done."""

_SERVERS: list[ForkServer] = []  # of the block that is running, see `loading_once`


class End(NamedTuple):
    """The return code of a process, less than 0 if it was killed, and the first signal that was handed on to it.

    ``fault`` is what `faulthandler` wrote where native code ended it.
    """

    return_code: int
    asked_by: int | None
    fault: str = ""

    @property
    def exit_code(self) -> int:
        """What a shell makes of it: the process's own code, or 128 and the number of the signal."""
        has_not_ended_by_itself = self.return_code < 0 or self.return_code in UNFINISHED
        if self.asked_by is not None and has_not_ended_by_itself:
            return 128 + self.asked_by
        return self.return_code if self.return_code >= 0 else 128 - self.return_code


class _CanEnd(Protocol):
    def terminate(self) -> None:
        """Ask it to end."""


class _Process(_CanEnd, Protocol):
    def wait(self) -> int:
        """Wait for its end."""


class _Signals:
    """Signals that arrived, and the process that each is handed on to, also those from before it was there."""

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
    """Run a Plimsoll command in a process of its own; signals that arrive meanwhile are handed on to it."""
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
    """Start a Plimsoll command: forked, where there is a server and it can, or else anew."""
    server = None if arguments[0] == "launch-worker" else next(iter(_SERVERS), None)
    if server is not None:
        signals.to(server)  # which may load for seconds yet
        with spinner("--quiet" in arguments):
            process = server.fork(arguments, variables)
        if process is not None:
            return process
    command = [sys.executable, "-m", "plimsoll", *arguments]
    return subprocess.Popen(command, process_group=0, env=os.environ | variables)


@contextmanager
def loading_once(directory: RunDirectory) -> Iterator[None]:
    """Load what the run in ``directory`` needs once while the block runs: its processes are forked from a server.

    Beside them it takes some 35 MiB of the machine: pages that they have written since, of which it has the original.

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
    """Load what the processes of a run need and be forked; returns the command line of each, in it.

    What cannot be loaded is said by the process that needs it.
    """
    from plimsoll.planning.lean_imports import leave_out_unused
    from plimsoll.training.baseline import load_training

    # Each process reads the file anew: to go on, and to take over a plan, is to write it while this one waits.
    job = Job.from_yaml(job_file)
    leave_out_unused(job)
    from plimsoll.step.oom_boundary import without_fail  # torch, of which is left out now what the job does not use

    with timed("loading"):
        without_fail(lambda: load_training(job))
    return serve()


def end_server() -> None:
    """Give back what the server of `loading_once` takes, if there is one: further processes are started anew."""
    for server in _SERVERS:
        server.terminate()
    _SERVERS.clear()
