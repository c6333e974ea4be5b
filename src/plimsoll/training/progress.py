"""The progress of a run, read incrementally from the metrics in its run directory, also while it is running.

When a run is resumed from a checkpoint, its metrics file is replaced (`plimsoll.training.run_directory`) and read from
the beginning again. Nothing is locked or changed. Does NOT know the state of the training process between two lines of
the metrics.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from plimsoll.records.base import Record
from plimsoll.records.plan import Plan
from plimsoll.records.run import DeathLine, EndLine, Line, OomEvent, RunHead, StartLine, StepLine, parse_line
from plimsoll.records.watch import Line as LimitLine
from plimsoll.records.watch import ProcessUse, RunProgress
from plimsoll.training.run_directory import RunDirectory

_STEPS_OF_A_RATE = 20

R = TypeVar("R", bound=Record)


class _Kept(Generic[R]):
    """The record in a file, kept in memory and read again only if the file was replaced."""

    def __init__(self, kind: type[R], path: Path) -> None:
        self._kind, self._path = kind, path
        self._inode = 0
        self._record: R | None = None

    def now(self) -> R | None:
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return None
        if inode != self._inode:
            self._inode, self._record = inode, self._kind.load(self._path)
        return self._record


class Follower:
    """A reader that follows the metrics of a run.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._metrics = directory.metrics
        self._directory = directory
        self._head, self._plan = _Kept(RunHead, directory.head), _Kept(Plan, directory.plan)
        self._begin_again()

    def _begin_again(self) -> None:
        self._inode, self._offset, self._start_step = 0, 0, 0
        self._steps: deque[StepLine] = deque(maxlen=_STEPS_OF_A_RATE)
        self._last: Line | None = None
        self._num_ooms = self._num_deaths = self._fallback = 0

    def progress(self) -> RunProgress:
        """Read the new lines, and return the progress of the run.

        Raises:
            RecordError: if a line of the metrics is damaged.
        """
        for line in self._new_lines():
            self._note(line)
        last, steps = self._last, self._steps
        head = self._head.now()
        step = steps[-1] if steps else None
        job = head.job if head is not None else {}
        plan = self._plan.now()
        prediction = plan.prediction if plan is not None else None
        return RunProgress(
            status=last.status if isinstance(last, EndLine) else "preparing" if last is None else "running",
            step=step.step if step is not None else self._start_step,
            num_steps=job.get("steps"),
            loss=step.loss if step is not None else None,
            micro_batch=step.micro_batch if step is not None else None,
            unit_name="samples" if job.get("task") == "classification" else "tokens",
            units_per_second=_rate([line.num_units for line in steps], steps),
            samples_per_second=_rate([line.num_samples for line in steps], steps),
            used_bytes=step.used_bytes if step is not None else None,
            peak_bytes=step.peak_bytes if step is not None else None,
            num_ooms=self._num_ooms,
            num_deaths=self._num_deaths,
            predicted_parts={} if prediction is None else {str(name): size for name, size in prediction.parts.items()},
            message=last.message if isinstance(last, EndLine) else "",
        )

    def budget_lines(self, processes: tuple[ProcessUse, ...], progress: RunProgress) -> list[LimitLine]:
        """Return a limit for each budget of the run (device, host), with the memory that counts against it.

        A budget is left out if the job does not set it, or if this memory is unknown.

        Args:
            processes: memory of the processes of the run.
            progress: the current progress.
        """
        head, plan = self._head.now(), self._plan.now()
        if head is None or plan is None:
            return []
        pid = self._directory.training_pid()
        private_bytes = next((use.private_bytes for use in processes if use.pid == pid), None)
        device_bytes = private_bytes if head.device.kind == "cpu" else progress.used_bytes
        lines = []
        if device_bytes is not None and plan.budget.device_bytes is not None:
            lines.append(
                LimitLine(
                    kind="budget",
                    name="budget of the run",
                    used_bytes=device_bytes,
                    limit_bytes=plan.budget.device_bytes,
                    expected_bytes=self._predicted_bytes(plan),
                )
            )
        if private_bytes is not None and plan.budget.host_bytes is not None:
            name = "budget of the run on the host"
            lines.append(
                LimitLine(kind="budget", name=name, used_bytes=private_bytes, limit_bytes=plan.budget.host_bytes)
            )
        return lines

    def _predicted_bytes(self, plan: Plan) -> int | None:
        """Return the predicted peak of the current fallback in bytes; ``None`` if it was not predicted."""
        peak = plan.fallbacks[self._fallback].peak if self._fallback < len(plan.fallbacks) else None
        return None if peak is None else peak.likely_bytes

    def _note(self, line: Line) -> None:
        self._last = line
        if isinstance(line, StepLine | StartLine):
            self._fallback = line.fallback
        if isinstance(line, StepLine):
            self._steps.append(line)
        elif isinstance(line, StartLine):
            self._steps.clear()
            self._start_step = line.step
        elif isinstance(line, OomEvent):
            self._num_ooms += 1
        elif isinstance(line, DeathLine):
            self._num_deaths += 1

    def _new_lines(self) -> list[Line]:
        try:
            with self._metrics.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._begin_again()
                    self._inode = status.st_ino
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        num_bytes = content.rfind(b"\n") + 1
        texts = content[:num_bytes].split(b"\n")[:-1]
        self._offset += num_bytes
        return [parse_line(text, f"a line of {self._metrics}") for text in texts]


def _rate(counts: Sequence[float], steps: deque[StepLine]) -> float | None:
    seconds = sum(line.step_seconds for line in steps)
    return sum(counts) / seconds if seconds else None
