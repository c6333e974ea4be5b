"""Records of processes that were watched from outside, and the file format of recordings.

A recording is a text file: the record without samples, then one line per sample, then the end of the watch. Lines are
appended one by one, so a kill loses at most the last line. An incomplete last line is ignored. `WatchRecord.read` loads
the whole file: one day with a sample every two seconds is 43,200 lines of about 1 KiB.
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
"""The source of a limit.

It is the machine's memory or swap, /dev/shm, a control group, RLIMIT_DATA, RLIMIT_AS, the budget of a run, or a GPU.
"""


Size = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProcessUse(Frozen):
    """The memory of one process at one moment.

    Attributes:
        pid: process id.
        parent: process id of the parent.
        name: the kernel's name of the process, at most 15 characters.
        private_bytes: anonymous pages, which only the process can free.
        file_bytes: pages of mapped files, which the kernel can drop and read again.
        shared_bytes: shared memory, such as the batches of DataLoader workers.
        swap_bytes: swapped-out memory.
        data_bytes: the memory that ``RLIMIT_DATA`` counts.
        data_limit_bytes: the value of ``RLIMIT_DATA``; ``None`` if unlimited.
        address_bytes: the address space that ``RLIMIT_AS`` counts.
        address_limit_bytes: the value of ``RLIMIT_AS``; ``None`` if unlimited.
        gpu_bytes: memory on all GPUs, as reported by the driver; ``None`` if not reported.
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
    """A memory limit, the memory that counts against it, and the time until it is reached.

    Attributes:
        kind: the source of the limit.
        name: a readable name, unique among the limits.
        used_bytes: the memory that counts against the limit now.
        limit_bytes: the limit.
        expected_bytes: the use that a plan predicts; ``None`` without a prediction. Growth up to this value causes no
            warning.
        seconds_left: time until the limit is reached at the current growth; ``None`` if there is no warning.
    """

    kind: LineKind
    name: str
    used_bytes: Size
    limit_bytes: Size
    expected_bytes: int | None = None
    seconds_left: float | None = None

    @property
    def used_share(self) -> float:
        """The used share of the limit."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 1.0


class RunProgress(Frozen):
    """The progress of a run according to its metrics. Unknown values are ``None``.

    Rates are means over the last steps. ``used_bytes`` is the memory after the last step and ``peak_bytes`` the peak of
    that step, as measured by the run: private memory on the CPU, allocated memory on CUDA. ``predicted_parts`` is the
    peak that the plan predicts, by category.
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
    """One observation of the watched processes.

    Attributes:
        seconds: time since the watch began.
        processes: the watched processes, parents first; for a whole machine, the largest processes.
        lines: the limits that apply to the watched processes.
        run: the progress of the run, if a run is watched.
        num_kills: the number of processes that the kernel has killed for lack of memory since the watch began. They are
            counted in the control groups of the watched processes, or on the whole machine if groups have no counter;
            ``None`` without any counter.
    """

    seconds: Seconds
    processes: tuple[ProcessUse, ...]
    lines: tuple[Line, ...]
    run: RunProgress | None = None
    num_kills: int | None = None

    @property
    def private_bytes(self) -> int:
        """The private memory of all watched processes."""
        return sum(use.private_bytes for use in self.processes)

    @property
    def warnings(self) -> tuple[Line, ...]:
        """The limits that will be reached at the current growth, soonest first."""
        near = (line for line in self.lines if line.seconds_left is not None)
        return tuple(sorted(near, key=lambda line: line.seconds_left or 0.0))


class WatchEnd(Frozen):
    """The end of a watch.

    Attributes:
        seconds: time since the watch began.
        how: ``stopped`` (only the watch ended), ``ended`` (the process exited, with ``exit_code``), ``killed`` (by a
            signal), ``out_of_memory`` (killed, and the kernel or the run reports a lack of memory), or ``gone`` (the
            process has ended, but it is unknown how).
        exit_code: the exit code of the process, negative for a signal; ``None`` if unknown.
        text: a description of the end.
    """

    seconds: Seconds
    how: Literal["stopped", "ended", "killed", "out_of_memory", "gone"]
    exit_code: int | None = None
    text: str


class WatchRecord(Record):
    """A watch: its subject, every sample in order, and its end.

    Attributes:
        subject: the name of the watched process, run or machine.
        wall_time: the date and time of the start.
        samples: the samples in order.
        end: the end; ``None`` if the recording is incomplete.
    """

    record_kind: ClassVar[str] = "watch"

    subject: str
    wall_time: str = ""
    samples: tuple[WatchSample, ...] = ()
    end: WatchEnd | None = None

    @property
    def has_warned(self) -> bool:
        """True if any sample has a warning, or memory ran out."""
        ran_out = self.end is not None and self.end.how == "out_of_memory"
        return ran_out or any(sample.warnings for sample in self.samples)

    @property
    def uses_by_pid(self) -> dict[int, list[tuple[float, ProcessUse]]]:
        """The samples of each process, with their times. Of a whole machine only the largest processes are sampled."""
        found: dict[int, list[tuple[float, ProcessUse]]] = {}
        for sample in self.samples:
            for use in sample.processes:
                found.setdefault(use.pid, []).append((sample.seconds, use))
        return found

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recording. An incomplete last line is ignored.

        Raises:
            RecordError: if the file cannot be read, or has a line that is not valid in a recording.
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
    """Return whether a file is a recording. Only its first bytes are read."""
    begin = b'{"record": "' + WatchRecord.record_kind.encode() + b'"'
    try:
        with path.open("rb") as file:
            return file.read(len(begin)) == begin
    except OSError:
        return False


def begin(path: Path, head: WatchRecord) -> None:
    """Create a recording that begins with ``head``, a record without samples.

    Raises:
        OutputError: if the file exists already, or cannot be written.
    """
    try:
        with path.open("xb"):
            pass
    except FileExistsError:
        raise OutputError(f"{path} exists already and is not overwritten: choose another file with --record") from None
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another file with --record") from None
    _append(path, head.to_json())


def append(path: Path, entry: WatchSample | WatchEnd) -> None:
    """Append a sample or the end of the watch to a recording, and flush it to the disk.

    Raises:
        OutputError: if the file cannot be written.
    """
    _append(path, entry.model_dump_json())


def _append(path: Path, text: str) -> None:
    try:
        with path.open("ab") as file:
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another file with --record") from None


def _entries(lines: Iterable[bytes], path: Path) -> Iterable[WatchSample | WatchEnd]:
    for number, line in enumerate(lines, 2):
        try:
            yield _ENTRY.validate_json(line)
        except ValidationError:
            raise RecordError(
                f"line {number} of {path} is not a sample of a watch: give a file of `plimsoll watch --record`"
            ) from None
