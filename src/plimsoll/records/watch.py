"""What was seen of processes from outside while they ran: the record of a watch, and the file it is recorded in.

A recording is a file of lines: the record without its samples, a sample a line, and how the watch ended. It is appended
line by line, so that a kill leaves all but the last; a torn last line is left out. It is read whole: a day of a sample
every two seconds is 43,200 lines of about 1 KiB.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from plimsoll.errors import OutputError, RecordError
from plimsoll.records.base import Frozen, Record

LineKind = Literal["machine", "swap", "shm", "cgroup", "data", "address", "budget", "gpu"]
"""What sets a limit: the machine's memory or swap, /dev/shm, a control group, RLIMIT_DATA, RLIMIT_AS, the budget of a
run, a GPU."""


Size = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProcessUse(Frozen):
    """Memory of one process at one moment.

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
        address_bytes: what ``RLIMIT_AS`` counts.
        address_limit_bytes: that limit, ``None`` without one.
        gpu_bytes: on all GPUs, as their driver says; ``None`` where it does not.
    """

    pid: int
    parent: int
    name: str
    private_bytes: Size
    file_bytes: Size
    shared_bytes: Size
    swap_bytes: Size
    data_bytes: Size
    data_limit_bytes: Size | None = None
    address_bytes: Size = 0
    address_limit_bytes: Size | None = None
    gpu_bytes: Size | None = None


class Line(Frozen):
    """One limit, what is used of it, and when it will be reached.

    Attributes:
        kind: what sets it.
        name: the same for a person, different for each limit.
        used_bytes: what it counts, now.
        limit_bytes: where it ends.
        expected_bytes: what a plan predicts will be used of it; growth up to there is no reason for a warning.
        seconds_left: until it is reached, should memory go on to grow as it did; ``None`` where nothing warns.
    """

    kind: LineKind
    name: str
    used_bytes: Size
    limit_bytes: Size
    expected_bytes: int | None = None
    seconds_left: float | None = None

    @property
    def used_share(self) -> float:
        """How much of the limit is used."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


class RunProgress(Frozen):
    """How far a run is, as its own lines say; what is not known yet is ``None``.

    Rates are over the last steps. ``used_bytes`` is after the last step and ``peak_bytes`` the most in it, as the run
    measures them: private memory on the CPU, allocated memory on CUDA. ``predicted_parts`` is what its plan says of the
    peak, by category.
    """

    status: Literal["preparing", "running", "finished", "interrupted", "failed"]
    step: int = 0
    num_steps: int | None = None
    loss: float | None = None
    micro_batch: int | None = None
    unit_name: Literal["tokens", "samples"] = "tokens"
    units_per_second: float | None = None
    samples_per_second: float | None = None
    used_bytes: int | None = None
    peak_bytes: int | None = None
    num_ooms: int = 0
    num_deaths: int = 0
    predicted_parts: dict[str, int] = {}
    message: str = ""


class WatchSample(Frozen):
    """One observation.

    Attributes:
        seconds: since the watch began.
        processes: those that are watched, the parent first; of a whole machine the largest.
        lines: every limit that holds for them.
        run: how far the run is, where one is watched.
        num_kills: processes that the kernel killed for memory since the watch began, in the control groups of the
            watched ones, or on the whole machine where groups do not count them; ``None`` where nothing counts.
    """

    seconds: Seconds
    processes: tuple[ProcessUse, ...]
    lines: tuple[Line, ...]
    run: RunProgress | None = None
    num_kills: int | None = None

    @property
    def private_bytes(self) -> int:
        """Of all processes that were looked at."""
        return sum(use.private_bytes for use in self.processes)

    @property
    def warnings(self) -> tuple[Line, ...]:
        """The limits that will be reached, the nearest first."""
        near = (line for line in self.lines if line.seconds_left is not None)
        return tuple(sorted(near, key=lambda line: line.seconds_left or 0.0))


class WatchEnd(Frozen):
    """How a watch ended.

    Attributes:
        seconds: since it began.
        how: ``stopped`` (the watch, not what was watched), ``ended`` (by itself, with ``exit_code``), ``killed`` (by a
            signal), ``out_of_memory`` (killed, and the kernel counted a kill for memory, or the run says so), or
            ``gone`` (unknown how).
        exit_code: of the process, less than 0 for a signal; ``None`` where unknown.
        text: the same in a sentence.
    """

    seconds: Seconds
    how: Literal["stopped", "ended", "killed", "out_of_memory", "gone"]
    exit_code: int | None = None
    text: str


class WatchRecord(Record):
    """A watch: what was watched, every sample in order, and how it ended.

    Attributes:
        subject: what was watched.
        wall_time: when the watch began.
        samples: in order.
        end: ``None`` where the recording breaks off.
    """

    record_kind: ClassVar[str] = "watch"

    subject: str
    wall_time: str = ""
    samples: tuple[WatchSample, ...] = ()
    end: WatchEnd | None = None

    @property
    def has_warned(self) -> bool:
        """Whether a limit was near in any sample, or memory ran out."""
        ran_out = self.end is not None and self.end.how == "out_of_memory"
        return ran_out or any(sample.warnings for sample in self.samples)

    @property
    def uses_by_pid(self) -> dict[int, list[tuple[float, ProcessUse]]]:
        """Each process over time, with the seconds of each sample; of a machine the largest, so some may be missing."""
        found: dict[int, list[tuple[float, ProcessUse]]] = {}
        for sample in self.samples:
            for use in sample.processes:
                found.setdefault(use.pid, []).append((sample.seconds, use))
        return found

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recording; a torn last line is left out.

        Raises:
            RecordError: if it cannot be read, or a line is none of a recording.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RecordError(
                f"cannot read {path} ({error.strerror}): give a file of `plimsoll watch --record`"
            ) from None
        first, *lines = content.split(b"\n")
        head = cls.from_json(first.decode(errors="replace"), f"line 1 of {path}")
        samples, end = list(head.samples), head.end
        for entry in _entries(lines[:-1], path):
            if isinstance(entry, WatchEnd):
                end = entry
            else:
                samples.append(entry)
        return head.model_copy(update={"samples": tuple(samples), "end": end})


_ENTRY: TypeAdapter[WatchSample | WatchEnd] = TypeAdapter(WatchSample | WatchEnd)


def is_recording(path: Path) -> bool:
    """Whether a file begins as a recording does; no more than its begin is read."""
    begin = b'{"record": "' + WatchRecord.record_kind.encode() + b'"'
    try:
        with path.open("rb") as file:
            return file.read(len(begin)) == begin
    except OSError:
        return False


def begin(path: Path, head: WatchRecord) -> None:
    """Begin a new recording.

    Raises:
        OutputError: if it is there already, or cannot be written.
    """
    try:
        with path.open("xb"):
            pass
    except FileExistsError:
        raise OutputError(f"{path} exists already and is not added to: give another --record") from None
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another --record") from None
    _append(path, head.to_json())


def append(path: Path, entry: WatchSample | WatchEnd) -> None:
    """Add a sample, or the end, to a recording and have it on the disk.

    Raises:
        OutputError: if it cannot be written.
    """
    _append(path, entry.model_dump_json())


def _append(path: Path, text: str) -> None:
    try:
        with path.open("ab") as file:
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another --record") from None


def _entries(lines: Iterable[bytes], path: Path) -> Iterable[WatchSample | WatchEnd]:
    for number, line in enumerate(lines, 2):
        try:
            yield _ENTRY.validate_json(line)
        except ValidationError:
            raise RecordError(
                f"line {number} of {path} is no sample of a watch: give a file of `plimsoll watch --record`"
            ) from None
