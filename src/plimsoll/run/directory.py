"""The run directory: where everything a run says and saves is kept.

    job.yaml  plan.json  run.json  metrics.jsonl  record.json  checkpoints/  model/  data/ (tokens, unless --cache)

`metrics.jsonl` is appended line by line; when a run goes on from a checkpoint, the lines of later steps are taken out
first, because those steps happen again. Each optimizer step is therefore in the file exactly once.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

import yaml

from plimsoll.errors import OutputError
from plimsoll.records.base import write_atomically
from plimsoll.records.job import Job
from plimsoll.records.run import (
    CheckpointLine,
    DeathLine,
    EndLine,
    EvaluationLine,
    Line,
    OomEvent,
    StartLine,
    StepLine,
    read_lines,
)


class RunDirectory:
    """Paths and the metrics file of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.yaml"
        self.plan = path / "plan.json"
        self.head = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.record = path / "record.json"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.prepared = path / "prepared.json"
        self.cache = path / "data"

    @classmethod
    def create(cls, path: Path, force: bool) -> RunDirectory:
        """Make a new, empty run directory.

        Raises:
            OutputError: if something is there already (unless ``force``, which removes it) or it cannot be written.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            if not force:
                raise OutputError(
                    f"{path} exists already and is not overwritten: give another --out, go on with "
                    f"`plimsoll train --resume --out {path}`, or remove what is there with --force"
                )
            _remove(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "metrics.jsonl", b"")
        except OSError as error:
            raise OutputError(f"cannot make the run directory {path}: {error.strerror}; give another --out") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of an earlier run.

        Raises:
            OutputError: if there is none.
        """
        if not (path / "job.yaml").is_file():
            raise OutputError(
                f"{path} is not a run directory (it has no job.yaml): give the --out of an earlier `plimsoll train`"
            )
        return cls(path)

    def write_job(self, job: Job) -> None:
        """Keep the job, with every default written out, where `plimsoll train --resume` finds it."""
        fields = job.model_dump(mode="json", exclude_none=True)
        write_atomically(self.job, yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).encode())

    def append(self, line: Line) -> None:
        """Add one line to the metrics.

        Raises:
            OutputError: if it cannot be written.
        """
        try:
            with self.metrics.open("a+b") as file:
                _drop_torn_line(file)
                file.write(line.model_dump_json().encode() + b"\n")
        except OSError as error:
            raise OutputError(
                f"cannot write {self.metrics}: {error.strerror}; free some space and go on with --resume"
            ) from None

    def lines(self) -> list[Line]:
        """All lines of the metrics."""
        return list(read_lines(self.metrics)) if self.metrics.is_file() else []

    def keep_until(self, step: int) -> None:
        """Take out of the metrics what happened after ``step`` and will happen again, and the note of an end."""
        kept = [line.model_dump_json() + "\n" for line in self.lines() if not _goes(line, step)]
        write_atomically(self.metrics, "".join(kept).encode())

    def micro_batch_in_force(self) -> int | None:
        """The micro-batch that the last training process used last."""
        for line in reversed(self.lines()):
            if isinstance(line, StepLine | StartLine):
                return line.micro_batch
            if isinstance(line, OomEvent) and line.phase == "evaluation":
                continue  # which has a ladder of its own
            if isinstance(line, OomEvent | DeathLine) and line.next_micro_batch is not None:
                return line.next_micro_batch
        return None


def _goes(line: Line, step: int) -> bool:
    """Whether a line says what will be said again when the run goes on after ``step``."""
    if isinstance(line, StepLine | EvaluationLine | CheckpointLine):
        return line.step > step
    return isinstance(line, EndLine)


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off a last line without an end, which a kill or a full disk left: the next one would be glued to it."""
    num_bytes = file.seek(0, os.SEEK_END)
    while num_bytes and _byte_at(file, num_bytes - 1) != b"\n":
        num_bytes -= 1
    file.truncate(num_bytes)


def _byte_at(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(1)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise OutputError(f"cannot remove {path}: {error.strerror}; give another --out") from None
