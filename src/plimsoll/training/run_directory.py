"""The run directory: where everything a run says and saves is kept.

    job.yaml  plan.json  run.json  metrics.jsonl  record.json  checkpoints/  model/  data/ (tokens, unless --cache)

The files `.plimsoll` and `.lock` are locked by the command of the run and by its training process, and say which ones.

`metrics.jsonl` is appended line by line; when a run goes on from a checkpoint, the lines of later steps are taken out
first, because those steps happen again. Each optimizer step is therefore in the file exactly once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

import yaml

from plimsoll.device.process_exit import start_ticks
from plimsoll.errors import OutputError, RecordError
from plimsoll.records.base import sync, write_atomically
from plimsoll.records.job import Job
from plimsoll.records.run import (
    CheckpointLine,
    DeathLine,
    EndLine,
    EvaluationLine,
    GraphLine,
    Line,
    LossLine,
    OomEvent,
    RunRecord,
    StartLine,
    StepLine,
    read_lines,
)

_MARKER = ".plimsoll"
"""Says that a run was made here. It stays when the run is removed, so that a removal that failed can be repeated."""

_LONGEST_LAST_STEP_SECONDS = 30.0
_ASK_SECONDS = 0.2

_WRITTEN = (
    *("job.yaml", "plan.json", "prepared.json", "run.json", "metrics.jsonl", "record.json"),
    *("checkpoints", "model", "data"),
)


class RunDirectory:
    """Paths and the metrics file of one run.

    Args:
        path: where it is.
        writes: whether this process keeps the metrics; of several ranks, one does.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path = path
        self.writes = writes
        self._has_appended = False
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
            OutputError: if something is there already (unless it is a run, and ``force`` removes that), another process
                trains there, or it cannot be written.
        """
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path} is a file, but a run needs a directory: give another --out")
        if path.exists() and any(path.iterdir()):
            if not _is_run(path):
                raise OutputError(
                    f"{path} is not empty and not a run, so nothing is written there or removed: give another --out"
                )
            if not force and not _has_not_begun(path):
                raise OutputError(
                    f"{path} exists already and is not overwritten: give another --out, go on with "
                    f"`plimsoll train --resume --out {path}`, or remove the run with --force"
                )
            with cls(path).claimed():
                if force:
                    _remove_run(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / _MARKER).touch()
            write_atomically(path / "metrics.jsonl", b"")
        except OSError as error:
            raise OutputError(f"cannot make the run directory {path}: {error.strerror}; give another --out") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path, writes: bool = True) -> RunDirectory:
        """Open the directory of an earlier run.

        Raises:
            OutputError: if there is none.
        """
        for name in ("job.yaml", "plan.json", "metrics.jsonl"):
            if not (path / name).is_file():
                raise OutputError(
                    f"{path} is not a run directory (it has no {name}): give the --out of an earlier `plimsoll train`"
                )
        return cls(path, writes)

    def write_job(self, job: Job) -> None:
        """Keep the job, with every default written out, where `plimsoll train --resume` finds it."""
        fields = job.model_dump(mode="json", exclude_none=True)
        write_atomically(self.job, yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).encode())

    def append(self, line: Line) -> None:
        """Add one line to the metrics.

        Raises:
            OutputError: if it cannot be written.
        """
        if not self.writes:
            return
        try:
            with self.metrics.open("r+b" if self._has_appended else "a+b") as file:  # it is not made again
                _drop_torn_line(file)
                file.write(line.model_dump_json().encode() + b"\n")
            self._has_appended = True
        except OSError as error:
            raise self._unwritable(error) from None

    def sync_metrics(self) -> None:
        """Have every line on the disk: what is written after this is never found there without them.

        Raises:
            OutputError: if the disk cannot take them.
        """
        if not self.writes:
            return
        try:
            sync(self.metrics)
            sync(self.path)
        except OSError as error:
            raise self._unwritable(error) from None

    def require_there(self) -> None:
        """Say so where the directory was removed under a run.

        Raises:
            OutputError: if it is gone.
        """
        if not self.metrics.is_file():
            raise OutputError(
                f"the run directory {self.path} is gone, or its files are: it was deleted or moved while the run used "
                "it, and what was not saved elsewhere is lost; start again with `plimsoll train job.yaml --out "
                f"{self.path}`, or where it was moved to, go on with `plimsoll train --resume --out` and that folder"
            )

    def _unwritable(self, error: OSError) -> OutputError:
        try:
            self.require_there()
        except OutputError as gone:
            return gone
        return OutputError(f"cannot write {self.metrics}: {error.strerror}; free some space and continue with --resume")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Be the only command that prepares, trains or removes this run; what it starts is `locked`.

        A training process that outlived its command is waited for: it finishes its last step, saves and ends.

        Raises:
            OutputError: if another command is at it, or such a process for longer than that takes.
        """
        with _exclusive(self.path / _MARKER):
            with self._when_it_has_ended(is_signed=False):
                pass
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that trains here; the lock goes with the process, however it ends.

        Raises:
            OutputError: if another process trains here, and does not end soon.
        """
        with self._when_it_has_ended():
            yield

    @contextmanager
    def _when_it_has_ended(self, *, is_signed: bool = True) -> Iterator[None]:
        """Hold the lock of the training process; another one is waited for, and that is said."""
        lock, until = self.path / ".lock", time.monotonic() + _LONGEST_LAST_STEP_SECONDS
        has_said = False
        while _is_held(lock) and time.monotonic() < until:
            if not has_said:
                has_said, pid = True, self.training_pid()
                who = "a training process of an earlier command" + ("" if pid is None else f" (process {pid})")
                print(
                    f"{who} is finishing its last step in {self.path}: waiting for it, up to "
                    f"{_LONGEST_LAST_STEP_SECONDS:g} s",
                    file=sys.stderr,
                )
            time.sleep(_ASK_SECONDS)
        with _exclusive(lock, is_signed=is_signed):
            yield

    def command_pid(self) -> int | None:
        """The process that prepares, plans or supervises this run on this machine; ``None`` without one."""
        return _holder(self.path / _MARKER)

    def training_pid(self) -> int | None:
        """The process that trains here, on this machine; it may outlive its command for a step."""
        return _holder(self.path / ".lock")

    def lines(self) -> list[Line]:
        """All lines of the metrics: 3 KiB for each step, which a process inside a budget may not have."""
        return list(self.each_line())

    def each_line(self) -> Iterator[Line]:
        """The lines of the metrics, one after the other, in the memory of one."""
        return read_lines(self.metrics) if self.metrics.is_file() else iter(())

    def keep_until(self, step: int) -> None:
        """Take out of the metrics what happened after ``step`` and will happen again, and the note of an end."""
        if not self.writes:
            return
        kept = (line.model_dump_json().encode() + b"\n" for line in self.each_line() if not _goes(line, step))
        write_atomically(self.metrics, kept)

    def last_saved_step(self) -> int:
        """The step of the newest checkpoint that was written, 0 without one."""
        return max((line.step for line in self.each_line() if isinstance(line, CheckpointLine)), default=0)

    def last_step(self) -> int:
        """The newest step that was done, 0 without one."""
        return max((line.step for line in self.each_line() if isinstance(line, StepLine)), default=0)

    def has_fit(self, fallback: int) -> bool:
        """Return whether a step was done with this fallback, or with one that needs more memory."""
        return any(isinstance(line, StepLine) and line.fallback <= fallback for line in self.each_line())

    def fallback_in_force(self) -> int | None:
        """The fallback that the last training process had in force, as far as its steps show it."""
        fallback = None
        for line in self.each_line():
            if isinstance(line, StepLine | StartLine):
                fallback = line.fallback
            elif isinstance(line, OomEvent | DeathLine) and line.next_fallback is not None:
                fallback = line.next_fallback
        return fallback

    def write_record(self) -> RunRecord:
        """Write ``record.json``, the record of all that has happened, and return it."""
        record = RunRecord.from_directory(self.path)
        record.save(self.record)
        return record

    def has_its_record(self) -> bool:
        """Whether ``record.json`` was written after the last line of the metrics, or there is nothing to record."""
        if not (self.head.is_file() and self.metrics.is_file()):
            return True
        return self.record.is_file() and self.record.stat().st_mtime_ns >= self.metrics.stat().st_mtime_ns


def metrics_of(path: Path) -> bytes:
    """Read what was noted of the run in a directory; nothing if there is none."""
    try:
        return (path / "metrics.jsonl").read_bytes()
    except OSError:
        return b""


def failed_run(path: Path, metrics_before: bytes) -> RunRecord | None:
    """Read the record of a run that did not end well; ``None`` if nothing was noted since ``metrics_before``."""
    if metrics_of(path) in {b"", metrics_before}:
        return None
    try:
        record = RunRecord.from_directory(path)
    except RecordError:
        return None
    return record if record.status in {"interrupted", "failed"} else None


def _goes(line: Line, step: int) -> bool:
    """Whether a line says what will be said again when the run goes on after ``step``."""
    if isinstance(line, StepLine | GraphLine | LossLine | EvaluationLine | CheckpointLine):
        return line.step > step
    return isinstance(line, EndLine)


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off a last line without an end, which a kill or a full disk left: the next one would be glued to it."""
    num_bytes = file.seek(0, os.SEEK_END)
    while num_bytes and _byte_at(file, num_bytes - 1) != b"\n":
        num_bytes -= 1
    file.truncate(num_bytes)
    file.seek(num_bytes)


def _byte_at(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(1)


def _has_not_begun(path: Path) -> bool:
    """Whether this is a run directory in which no step was done: what was wrong is corrected and tried again."""
    if not (path / "job.yaml").is_file():
        return False
    return not any(isinstance(line, StepLine | CheckpointLine) for line in RunDirectory(path).each_line())


def _is_held(path: Path) -> bool:
    """Whether another process has locked a file."""
    with suppress(OSError), path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _exclusive(path: Path, *, is_signed: bool = True) -> Iterator[None]:
    try:
        file = path.open("a")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; allow it, or give another --out") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_signed:
                _sign(file)
        except BlockingIOError:
            raise OutputError(
                f"another process is training in {path.parent}, preparing its data or finishing its last step: wait "
                "for it to end, or give another --out"
            ) from None
        yield


def _sign(file: TextIO) -> None:
    """Say in a locked file who locked it, for `plimsoll watch`; a full disk is no reason not to train."""
    with suppress(OSError):
        file.truncate(0)
        file.write(f"{os.getpid()} {start_ticks(os.getpid())}\n")
        file.flush()


def _holder(path: Path) -> int | None:
    """The process that last claimed a file and still runs, here; without a trial of the lock, which would refuse it."""
    try:
        pid, ticks = map(int, path.read_text().split())
    except (OSError, ValueError):  # claimed by nobody yet, or on a machine without /proc
        return None
    return pid if start_ticks(pid) == ticks else None


def _is_run(path: Path) -> bool:
    """Whether a run was made here, in what was an empty folder then; other programs write files of the same names."""
    return (path / _MARKER).is_file()


def _remove_run(path: Path) -> None:
    """Remove what Plimsoll writes; what somebody put beside it stays."""
    try:
        for name in _WRITTEN:
            entry = path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot remove the run in {path}: {error.strerror}; give another --out") from None
