"""A `plimsoll train` command, and the disturbances that `endurance.py` applies to its processes.

To deprive the running training process of memory, its RLIMIT_DATA is lowered from outside (prlimit) for a moment.
Allocations then fail at any point of the step. `PLIMSOLL_FAILPOINTS` injects errors into short phases that such a
moment seldom hits. All other disturbances are signals. Linux only; no privileges are needed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

import psutil

from plimsoll.device.process import data_bytes
from plimsoll.records.run import CheckpointLine, Line, StartLine, StepLine, parse_line
from plimsoll.training.run_directory import RunDirectory

MIB = 1 << 20
INTERRUPTED = {130, 143}
_GONE = (psutil.Error, OSError)
_LONGEST_WAIT_SECONDS = 180.0
_HOLD_SECONDS = 0.002  # the training process restores its limit 20 times a second

# How often each kind occurs in a deck. A deck is shuffled and dealt completely before the next one.
SURVIVED = {"memory taken": 8, "loader worker killed": 2, "loader worker starved": 1, "frozen": 1}
ENDING = {
    "training killed": 2,
    "training killed while loading": 1,
    "supervisor killed": 1,
    "both killed": 1,
    "interrupted (SIGINT)": 1,
    "terminated (SIGTERM)": 1,
}
_PHASES = ("fetch", "copy", "forward", "loss", "backward", "clip", "optimizer", "evaluation", "checkpoint")


class Metrics:
    """The lines of a run's metrics, read incrementally; read from the start again if the run replaced the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, 0, 0
        self.began_seconds = 0.0  # start time of the process that wrote the last lines
        self.steps_since_start: list[StepLine] = []
        self.has_saved = False
        self.last_step = 0

    def read(self) -> None:
        """Read the lines written since the last call."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset, self.last_step = inode, 0, 0
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    return
                self._offset += len(text)
                self._note(parse_line(text, str(self._path)))

    def _note(self, line: Line) -> None:
        if isinstance(line, StartLine):
            self.began_seconds = datetime.fromisoformat(line.wall_time).timestamp()
            self.steps_since_start, self.has_saved = [], False
        elif isinstance(line, StepLine):
            self.steps_since_start.append(line)
            self.last_step = line.step
        elif isinstance(line, CheckpointLine):
            self.has_saved = True


class Command:
    """One `plimsoll train` in a separate process group, so that Ctrl-C does not reach it."""

    def __init__(self, arguments: list[str], folder: Path, log: IO[bytes], failpoints: str = "") -> None:
        environment = os.environ | {"PLIMSOLL_CACHE": str(folder / "cache"), "PLIMSOLL_FAILPOINTS": failpoints}
        command = [sys.executable, "-m", "plimsoll", "train", *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=log, stdin=subprocess.DEVNULL, process_group=0
        )

    def stop(self, number: int = signal.SIGINT) -> int:
        """Ask the command to stop after the current step, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(_LONGEST_WAIT_SECONDS)


def failpoints(drawn: random.Random) -> str:
    """Draw the failpoints of the next processes: one out-of-memory error in each of a few phases."""
    phases = drawn.sample(_PHASES, 3)
    return ",".join(f"{phase}@{drawn.randint(*((1, 2) if phase in _PHASES[-2:] else (2, 60)))}" for phase in phases)


@dataclass
class Disturber:
    """Disturbs one run until it is told to stop, and records each disturbance."""

    run: Path
    start: Callable[[], Command]
    random: random.Random
    note: Callable[[str, str], None]
    metrics: Metrics = field(init=False)
    command: Command | None = None
    is_gentle: bool = False  # memory is taken for less than a step, which every fallback survives
    stepping_pid: int | None = None  # the last process that has saved a step
    repeated: Callable[[list[StepLine]], None] = lambda steps: None  # called with the steps that will be repeated

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.run / "metrics.jsonl")

    def begin(self) -> None:
        """Start the command, or resume the run."""
        wait_until(lambda: self.training() is None, "the training process before this one to end")
        self.command = self.start()

    def stop(self) -> int:
        """Ask the command to stop after the current step, and return its exit code."""
        assert self.command is not None
        return self.command.stop()

    def training(self) -> psutil.Process | None:
        """Return the training process, whose id is in a file of the run."""
        pid = RunDirectory(self.run).training_pid()
        if pid is None:
            return None
        with suppress(*_GONE):
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        return None

    def ended(self) -> int | None:
        """Return the exit code of the command if it has ended without being asked."""
        assert self.command is not None
        return self.command.process.poll()

    def is_training(self, num_steps: int) -> bool:
        """Return whether the current training process has finished ``num_steps`` steps and saved one of them."""
        process = self.training()
        self.metrics.read()
        if process is None or not self._has_begun(process):
            return False
        if not self.metrics.has_saved or len(self.metrics.steps_since_start) < num_steps:
            return False
        self.stepping_pid = process.pid
        return True

    def _has_begun(self, process: psutil.Process) -> bool:
        """Return whether the last metrics were written by this process and not by an earlier one."""
        with suppress(*_GONE):
            return self.metrics.began_seconds > process.create_time()
        return False

    def do(self, kind: str) -> None:
        """Apply one disturbance, of `SURVIVED` or `ENDING`."""
        said = getattr(self, "_" + kind.split(" (", maxsplit=1)[0].replace(" ", "_"))()
        if said is not None:
            self.note(kind, said)

    # -- what the training process survives ----------------------------------------------------------------------------

    def _memory_taken(self) -> str | None:
        """Limit the process to slightly more or less memory than it holds, for a moment or some seconds."""
        seconds = self.random.choice((0.05,) if self.is_gentle else (0.05, 0.3, 1.0, 3.0))
        seconds *= self.random.uniform(0.5, 1.5)
        free_bytes = round(self.random.choice((-4, 0, 1, 4, 16)) * MIB * self.random.uniform(0.5, 1))
        process = self.training()
        if process is None:
            return None
        with suppress(*_GONE):
            level_bytes = data_bytes(process.pid) + free_bytes
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                soft, hard = process.rlimit(psutil.RLIMIT_DATA)
                if soft == psutil.RLIM_INFINITY or soft > level_bytes:
                    process.rlimit(psutil.RLIMIT_DATA, (level_bytes, hard))
                time.sleep(_HOLD_SECONDS)
        return f"room for {free_bytes / MIB:.1f} MiB, {seconds:.2f} s"

    def _loader_worker(self) -> psutil.Process | None:
        process = self.training()
        children: list[psutil.Process] = []
        with suppress(*_GONE):
            children = process.children() if process is not None else []
        return self.random.choice(children) if children else None

    def _loader_worker_killed(self) -> str | None:
        worker = self._loader_worker()
        if worker is None:
            return None
        with suppress(*_GONE):
            worker.kill()
        return f"process {worker.pid}"

    def _loader_worker_starved(self) -> str | None:
        """Limit a loader worker to the memory that it already holds."""
        worker = self._loader_worker()
        if worker is None:
            return None
        with suppress(*_GONE):
            worker.rlimit(psutil.RLIMIT_DATA, (data_bytes(worker.pid), worker.rlimit(psutil.RLIMIT_DATA)[1]))
        return f"process {worker.pid}"

    def _frozen(self) -> str | None:
        """Suspend all processes of the run, like a closed laptop, and continue them."""
        assert self.command is not None
        seconds = self.random.uniform(0.5, 3)
        with suppress(*_GONE):
            root = psutil.Process(self.command.process.pid)
            processes = [root, *root.children(recursive=True)]
            for process in processes:
                process.suspend()
            time.sleep(seconds)
            for process in processes:
                with suppress(*_GONE):
                    process.resume()
        return f"{seconds:.1f} s"

    # -- what it does not ----------------------------------------------------------------------------------------------

    def _training_killed(self) -> str | None:
        process = self.training()
        if process is None:
            return None
        with suppress(*_GONE):
            process.kill()
            process.wait(_LONGEST_WAIT_SECONDS)
        self._note_repeated()
        return f"process {process.pid} after step {self.metrics.last_step}"

    def _training_killed_while_loading(self) -> str | None:
        """Kill the training process, and also the next one before its first step."""
        first = self._training_killed()
        if first is None:
            return None
        wait_until(lambda: self.training() is not None or self.ended() is not None, "the next training process")
        time.sleep(self.random.uniform(0, 4))
        process = self.training()
        self.metrics.read()
        if process is None or self._has_begun(process):
            return first
        with suppress(*_GONE):
            process.kill()
        return f"{first}, and process {process.pid} before its first step"

    def _supervisor_killed(self) -> str:
        """Kill the supervisor; the training process finishes and saves its step, and ends by itself."""
        assert self.command is not None
        self.command.process.kill()
        self.command.process.wait()
        step = self._last_step()
        self.begin()
        return f"after step {step}"

    def _both_killed(self) -> str:
        """Kill the supervisor and the training process at once, like a power failure."""
        assert self.command is not None
        self.command.process.send_signal(signal.SIGSTOP)  # so that it starts no process in between
        process = self.training()
        self.command.process.kill()
        with suppress(*_GONE):
            if process is not None:
                process.kill()
        self.command.process.wait()
        self._note_repeated()
        step = self._last_step()
        self.begin()
        return f"after step {step}"

    def _interrupted(self) -> str:
        return self._asked_to_stop(signal.SIGINT)

    def _terminated(self) -> str:
        return self._asked_to_stop(signal.SIGTERM)

    def _asked_to_stop(self, number: int) -> str:
        assert self.command is not None
        code = self.command.stop(number)
        step = self._last_step()
        self.begin()
        said = f"after step {step}"
        return said if code == 128 + number else f"{said}; exit code {code} in place of {128 + number}"

    def _last_step(self) -> int:
        self.metrics.read()
        return self.metrics.last_step

    def _note_repeated(self) -> None:
        """Report the steps after the last checkpoint, which the next process repeats."""
        lines = list(_lines(self.run / "metrics.jsonl"))
        saved = max((line.step for line in lines if isinstance(line, CheckpointLine)), default=0)
        self.repeated([line for line in lines if isinstance(line, StepLine) and line.step > saved])


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield parse_line(text, str(path))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds.

    Raises:
        SystemExit: if it does not hold within the longest waiting time.
    """
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited {_LONGEST_WAIT_SECONDS:.0f} s for {what}, which did not come")
        time.sleep(0.02)


def deck_of(kinds: dict[str, int], drawn: random.Random) -> Iterator[str]:
    """Yield kinds forever: in every round each kind as often as its number, shuffled."""
    while True:
        cards = [kind for kind, number in kinds.items() for _ in range(number)]
        drawn.shuffle(cards)
        yield from cards
