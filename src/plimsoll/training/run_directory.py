"""The run directory, which contains the job, the plan, the metrics, the checkpoints and the model of a run.

    job.yaml  plan.json  run.json  metrics.jsonl  record.json  checkpoints/  model/  data/ (tokens, unless --cache)

The command of the run locks the file `.plimsoll`, and its training process locks `.lock`. Each file contains the
process ID of the owner.

`metrics.jsonl` is appended line by line. When a run is resumed from a checkpoint, the lines of later steps are removed
first, because those steps are repeated. Each optimizer step is therefore in the file exactly once.
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
"""Name of the file that marks a run directory. It is not removed with the run, so a failed removal can be repeated."""

_LONGEST_LAST_STEP_SECONDS = 30.0
_ASK_SECONDS = 0.2

_WRITTEN = (
    *("job.yaml", "plan.json", "prepared.json", "run.json", "metrics.jsonl", "record.json"),
    *("checkpoints", "model", "data"),
)


class RunDirectory:
    """The files of one run: their paths, the locks, and reading and writing of the metrics.

    Args:
        path: the run directory.
        writes: whether this process writes the metrics; only one rank does.
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
        """Create a new, empty run directory.

        Args:
            path: the run directory.
            force: remove an existing run first.

        Raises:
            OutputError: if ``path`` is a file, a folder of other files, or, without ``force``, a run with completed
                steps; if another process trains in ``path``; or if ``path`` cannot be written.
        """
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path} is a file, but a run needs a directory: give another --out")
        if path.exists() and any(path.iterdir()):
            if not _is_run(path):
                raise OutputError(
                    f"{path} is not empty and not a run directory, so it is left unchanged: give another --out"
                )
            if not force and not _has_not_begun(path):
                raise OutputError(
                    f"{path} exists already and is not overwritten: give another --out, resume with "
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
            raise OutputError(f"cannot create the run directory {path}: {error.strerror}; give another --out") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path, writes: bool = True) -> RunDirectory:
        """Open the directory of an earlier run.

        Args:
            path: the run directory.
            writes: whether this process writes the metrics.

        Raises:
            OutputError: if ``path`` is not a run directory.
        """
        for name in ("job.yaml", "plan.json", "metrics.jsonl"):
            if not (path / name).is_file():
                raise OutputError(
                    f"{path} is not a run directory (it has no {name}): give the --out of an earlier `plimsoll train`"
                )
        return cls(path, writes)

    def write_job(self, job: Job) -> None:
        """Save the job with all defaults, for `plimsoll train --resume`."""
        fields = job.model_dump(mode="json", exclude_none=True)
        write_atomically(self.job, yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).encode())

    def append(self, line: Line) -> None:
        """Append one line to the metrics.

        Raises:
            OutputError: if the line cannot be written.
        """
        if not self.writes:
            return
        try:
            with self.metrics.open("r+b" if self._has_appended else "a+b") as file:  # recreates no deleted file
                _drop_torn_line(file)
                file.write(line.model_dump_json().encode() + b"\n")
            self._has_appended = True
        except OSError as error:
            raise self._unwritable(error) from None

    def sync_metrics(self) -> None:
        """Flush the metrics to the disk, so that a power loss cannot keep later files but lose these lines.

        Raises:
            OutputError: if writing fails.
        """
        if not self.writes:
            return
        try:
            sync(self.metrics)
            sync(self.path)
        except OSError as error:
            raise self._unwritable(error) from None

    def require_there(self) -> None:
        """Raise if the directory was removed during the run.

        Raises:
            OutputError: if the metrics file no longer exists.
        """
        if not self.metrics.is_file():
            raise OutputError(
                f"the run directory {self.path} or its files do not exist any more: the folder was deleted or moved "
                f"during the run; start again with `plimsoll train job.yaml --out {self.path}` or, if it was moved, "
                "resume with `plimsoll train --resume --out` and the new folder"
            )

    def _unwritable(self, error: OSError) -> OutputError:
        try:
            self.require_there()
        except OutputError as gone:
            return gone
        return OutputError(f"cannot write {self.metrics}: {error.strerror}; free some space and continue with --resume")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the lock of the command that prepares, trains or removes this run. Its training process holds `locked`.

        If the training process of an earlier command is still running, wait until it has finished its step and saved.

        Raises:
            OutputError: if another command holds the lock, or the training process does not end in time.
        """
        with _exclusive(self.path / _MARKER):
            with self._when_it_has_ended(is_signed=False):
                pass
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the training process; the operating system releases it when the process ends.

        Raises:
            OutputError: if another process trains here, and does not end in time.
        """
        with self._when_it_has_ended():
            yield

    @contextmanager
    def _when_it_has_ended(self, *, is_signed: bool = True) -> Iterator[None]:
        """Wait until no other training process holds the lock of the training process, and hold it during the block.

        With ``is_signed``, the ID of this process is written into the lock file.
        """
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
        """Return the ID of the process that prepares, plans or supervises this run.

        Returns ``None`` if no such process runs on this machine.
        """
        return _holder(self.path / _MARKER)

    def training_pid(self) -> int | None:
        """Return the ID of the training process; ``None`` if none runs on this machine.

        The process may outlive the command that started it by one step.
        """
        return _holder(self.path / ".lock")

    def lines(self) -> list[Line]:
        """Return all lines of the metrics. They need 3 KiB of memory per step; inside a budget, use `each_line`."""
        return list(self.each_line())

    def each_line(self) -> Iterator[Line]:
        """Yield the lines of the metrics one by one, with only one line in memory."""
        return read_lines(self.metrics) if self.metrics.is_file() else iter(())

    def keep_until(self, step: int) -> None:
        """Remove the metrics lines of all steps after ``step``, because the resumed run repeats these steps.

        Also remove the line that marks the end of the run.
        """
        if not self.writes:
            return
        kept = (line.model_dump_json().encode() + b"\n" for line in self.each_line() if not _goes(line, step))
        write_atomically(self.metrics, kept)

    def last_saved_step(self) -> int:
        """Return the step of the newest checkpoint, or 0 without one."""
        return max((line.step for line in self.each_line() if isinstance(line, CheckpointLine)), default=0)

    def last_step(self) -> int:
        """Return the last completed step, or 0 without one."""
        return max((line.step for line in self.each_line() if isinstance(line, StepLine)), default=0)

    def has_fit(self, fallback: int) -> bool:
        """Return whether a step has completed with this fallback, or with a fallback that needs more memory."""
        return any(isinstance(line, StepLine) and line.fallback <= fallback for line in self.each_line())

    def fallback_in_force(self) -> int | None:
        """Return the index in the plan of the fallback that the run used last; ``None`` if no metrics line has it."""
        fallback = None
        for line in self.each_line():
            if isinstance(line, StepLine | StartLine):
                fallback = line.fallback
            elif isinstance(line, OomEvent | DeathLine) and line.next_fallback is not None:
                fallback = line.next_fallback
        return fallback

    def write_record(self) -> RunRecord:
        """Write ``record.json``, the record of the whole run, and return it."""
        record = RunRecord.from_directory(self.path)
        record.save(self.record)
        return record

    def has_its_record(self) -> bool:
        """Return whether ``record.json`` is newer than the metrics, or the run has nothing to record yet."""
        if not (self.head.is_file() and self.metrics.is_file()):
            return True
        return self.record.is_file() and self.record.stat().st_mtime_ns >= self.metrics.stat().st_mtime_ns


def metrics_of(path: Path) -> bytes:
    """Return the content of the metrics file of a run directory; empty if it does not exist."""
    try:
        return (path / "metrics.jsonl").read_bytes()
    except OSError:
        return b""


def failed_run(path: Path, metrics_before: bytes) -> RunRecord | None:
    """Return the record of a run that failed or was interrupted.

    Args:
        path: the run directory.
        metrics_before: content of its metrics file before the run.

    Returns:
        The record; ``None`` if the metrics equal ``metrics_before``, or the run neither failed nor was interrupted.
    """
    if metrics_of(path) in {b"", metrics_before}:
        return None
    try:
        record = RunRecord.from_directory(path)
    except RecordError:
        return None
    return record if record.status in {"interrupted", "failed"} else None


def _goes(line: Line, step: int) -> bool:
    """Return whether a metrics line must be removed when the run is resumed after ``step``.

    This holds for lines of later steps, which the run repeats, and for the line that marks the end of the run.
    """
    if isinstance(line, StepLine | GraphLine | LossLine | EvaluationLine | CheckpointLine):
        return line.step > step
    return isinstance(line, EndLine)


def _drop_torn_line(file: BinaryIO) -> None:
    """Remove an incomplete last line, left by a kill or a full disk, which would be joined to the next line."""
    num_bytes = file.seek(0, os.SEEK_END)
    while num_bytes and _byte_at(file, num_bytes - 1) != b"\n":
        num_bytes -= 1
    file.truncate(num_bytes)
    file.seek(num_bytes)


def _byte_at(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(1)


def _has_not_begun(path: Path) -> bool:
    """Return whether this is a run directory without a completed step, which a new run may use."""
    if not (path / "job.yaml").is_file():
        return False
    return not any(isinstance(line, StepLine | CheckpointLine) for line in RunDirectory(path).each_line())


def _is_held(path: Path) -> bool:
    """Return whether another process has locked a file."""
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
    """Write the ID of this process into a locked file, for `plimsoll watch`. Errors are ignored."""
    with suppress(OSError):
        file.truncate(0)
        file.write(f"{os.getpid()} {start_ticks(os.getpid())}\n")
        file.flush()


def _holder(path: Path) -> int | None:
    """Return the ID of the process that last locked a file; ``None`` if it no longer runs.

    The ID is read from the file. Trying to lock the file instead could make that process fail to lock it.
    """
    try:
        pid, ticks = map(int, path.read_text().split())
    except (OSError, ValueError):  # never locked, or on a machine without /proc
        return None
    return pid if start_ticks(pid) == ticks else None


def _is_run(path: Path) -> bool:
    """Return whether Plimsoll created this run directory; other programs write files with the same names."""
    return (path / _MARKER).is_file()


def _remove_run(path: Path) -> None:
    """Remove the files that Plimsoll writes; other files in the directory stay."""
    try:
        for name in _WRITTEN:
            entry = path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot remove the run in {path}: {error.strerror}; give another --out") from None
