"""What was seen of processes from outside while they ran: one line of JSON per sample, and the record of them all.

A file of samples is appended line by line, so that a kill leaves all but the last; a torn last line is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ValidationError

from plimsoll.errors import OutputError, RecordError
from plimsoll.records.base import Frozen, Record


class ProcessUse(Frozen):
    """Host memory of one process at one moment.

    Attributes:
        pid: its number.
        parent: the number of the process that started it.
        name: as the kernel has it, at most 15 characters.
        private_bytes: anonymous pages, which only freeing gives back.
        file_bytes: pages of mapped files, which the kernel can drop and read again.
        shared_bytes: shared memory, such as the batches of a DataLoader's workers.
        swap_bytes: what lies in swap.
        data_bytes: what ``RLIMIT_DATA`` counts.
        data_limit_bytes: that limit, ``None`` without one.
    """

    pid: int
    parent: int
    name: str
    private_bytes: int
    file_bytes: int
    shared_bytes: int
    swap_bytes: int
    data_bytes: int
    data_limit_bytes: int | None = None


class Line(Frozen):
    """One limit, what is used of it, and when it will be reached.

    Attributes:
        name: what sets it.
        used_bytes: what it counts, now.
        limit_bytes: where it ends.
        seconds_left: until it is reached, should memory go on to grow as it did; ``None`` where nothing warns.
    """

    name: str
    used_bytes: int
    limit_bytes: int
    seconds_left: float | None = None


class WatchSample(Frozen):
    """One look.

    Attributes:
        seconds: since the watch began.
        processes: those that are watched, the parent first.
        lines: every limit that holds for them.
    """

    seconds: float
    processes: tuple[ProcessUse, ...]
    lines: tuple[Line, ...]


class WatchRecord(Record):
    """Every sample of a watch, in order."""

    record_kind: ClassVar[str] = "watch"

    samples: tuple[WatchSample, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of samples; a torn last line is left out.

        Raises:
            RecordError: if it cannot be read, or another line is no sample.
        """
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise RecordError(
                f"cannot read {path} ({error.strerror}): give a file of `plimsoll watch --record`"
            ) from None
        return cls(samples=tuple(_samples(lines, path)))


def append(path: Path, sample: WatchSample) -> None:
    """Add one sample to a file and have it on the disk.

    Raises:
        OutputError: if it cannot be written.
    """
    try:
        with path.open("ab") as file:
            file.write(sample.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another --record") from None


def _samples(lines: Iterable[bytes], path: Path) -> Iterable[WatchSample]:
    for number, line in enumerate(lines, 1):
        try:
            yield WatchSample.model_validate_json(line)
        except ValidationError:
            raise RecordError(
                f"line {number} of {path} is no sample of a watch: give a file of `plimsoll watch --record`"
            ) from None
