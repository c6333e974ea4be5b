"""Repeated samples of processes, with a warning before a limit is reached.

A watch follows one of these: a process and its children; a run by its directory, that is, its command with all
processes, even if they are restarted; or the largest processes of this machine.

The growth rate is the Theil-Sen slope of the last 30 samples, and needs at least 8. A warning starts when the limit
will be reached in under 60 s at this rate, and is at least half used. It ends when the limit is over 120 s away, so
that warnings do not flicker. Memory use below the plan's predicted peak gives no warning. Not handled: growth that
would stop by itself causes warnings, too.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from plimsoll.device.cpu.cgroup import KillCounter
from plimsoll.device.cuda.nvml import GpuUse, gpu_uses
from plimsoll.device.process_exit import Watched
from plimsoll.device.watched import family_of, largest, lines_of
from plimsoll.diagnose.growth import theil_sen
from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.records.watch import Line, ProcessUse, RunProgress, WatchEnd, WatchRecord, WatchSample
from plimsoll.training.progress import Follower
from plimsoll.training.run_directory import RunDirectory

_FEWEST_POINTS, _MOST_POINTS = 8, 30
_WARN_SECONDS, _CALM_SECONDS = 60.0, 120.0
_LEAST_USED_SHARE = 0.5


class Forecast:
    """A forecast of when the memory use reaches one limit. It must receive every sample, in order."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque(maxlen=_MOST_POINTS)
        self._is_warning = False

    def seconds_left(self, seconds: float, line: Line) -> float | None:
        """Add a sample, and return the seconds until the limit is reached; ``None`` if there is no reason to warn.

        Args:
            seconds: the time of the sample.
            line: the limit, with the bytes in use.
        """
        self._points.append((seconds, line.used_bytes))
        if len(self._points) < _FEWEST_POINTS:
            return None
        if line.used_bytes < _LEAST_USED_SHARE * line.limit_bytes or line.used_bytes <= (line.expected_bytes or 0):
            self._is_warning = False
            return None
        rate = theil_sen(tuple(self._points))
        left = max(0, line.limit_bytes - line.used_bytes) / rate if rate > 0 else float("inf")
        self._is_warning = left <= (_CALM_SECONDS if self._is_warning else _WARN_SECONDS)
        return left if self._is_warning else None


class Watch:
    """A watch of a process, a run or, if neither is given, the machine. A ``with`` block closes it.

    Args:
        pid: id of the process; for a run, id of the process of its command. ``None`` watches the machine.
        run: the run directory; ``None`` if no run is watched.
        num_processes: if the machine is watched, the number of its largest processes in each sample.

    Raises:
        InputError: if there is no such process.
    """

    def __init__(self, pid: int | None = None, run: RunDirectory | None = None, num_processes: int = 10) -> None:
        self._pid, self._run, self._num_processes = pid, run, num_processes
        self._stack = ExitStack()
        self._follower = None if run is None else Follower(run)
        self._kills = KillCounter(pid)
        self._kills_before = self._kills.read()
        self._forecasts: dict[str, Forecast] = {}
        self._watched = None if pid is None else Watched(pid)
        if self._watched is not None and self._watched.has_ended:
            self._watched.close()
            raise InputError(f"there is no running process {pid}: give the number of one, as `ps` shows it")
        self._started = time.monotonic()

    def __enter__(self) -> Watch:
        """Open the connection to the GPU driver."""
        self._gpus = self._stack.enter_context(gpu_uses())
        if self._watched is not None:
            self._stack.callback(self._watched.close)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection to the GPU driver and the file descriptor of the watched process."""
        self._stack.close()

    def head(self) -> WatchRecord:
        """Return the beginning of a recording: the subject of this watch and the time, without samples."""
        if self._run is not None:
            subject = f"run {self._run.path.resolve().name}"
        else:
            subject = "this machine" if self._pid is None else f"process {self._pid}"
        return WatchRecord(subject=subject, wall_time=datetime.now(UTC).isoformat(timespec="seconds"))

    def samples(self, every_seconds: float, num_samples: int | None) -> Iterator[WatchSample]:
        """Yield samples until the watched process ends, or `num_samples` were taken.

        Args:
            every_seconds: seconds between samples.
            num_samples: number of samples; ``None`` for no limit.

        Raises:
            InputError: if a process belongs to another user and is hidden.
            RecordError: if the metrics of the run are damaged.
        """
        number = 0
        while num_samples is None or number < num_samples:
            sample = self._look()
            if self._pid is not None and not sample.processes:
                return
            yield sample
            number += 1
            if number != num_samples and self._wait(every_seconds):
                return

    def _wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the watched process to end, and return whether it has ended."""
        if self._watched is not None:
            return self._watched.wait(seconds)
        time.sleep(seconds)
        return False

    def _look(self) -> WatchSample:
        gpus: tuple[GpuUse, ...] = self._gpus()
        is_machine = self._pid is None
        processes = largest(self._num_processes, gpus) if self._pid is None else family_of(self._pid, gpus)
        seconds = time.monotonic() - self._started
        run = self._follower.progress() if self._follower is not None else None
        lines = [*self._budget_lines(processes, run), *lines_of(processes, gpus, is_machine=is_machine)]
        return WatchSample(
            seconds=round(seconds, 3),
            processes=processes,
            lines=tuple(self._foreseen(seconds, line) for line in lines),
            run=run,
            num_kills=self._num_kills(),
        )

    def end(self) -> WatchEnd:
        """Return how the watch ended. Call this directly after the last sample."""
        seconds = round(time.monotonic() - self._started, 3)
        if self._watched is None or not self._watched.has_ended:
            return WatchEnd(
                seconds=seconds, how="stopped", text="the watch was stopped; the watched processes continue"
            )
        code = self._watched.exit_code()
        said = f"; {words}" if (words := self._said()) else ""
        if code is None:
            text = f"process {self._pid} has ended, its exit code is unknown{said}"
            return WatchEnd(seconds=seconds, how="gone", text=text)
        if code >= 0:
            text = f"process {self._pid} ended with exit code {code}{said}"
            is_out = self._run is not None and code == OutOfMemoryError.exit_code
            return WatchEnd(seconds=seconds, how="out_of_memory" if is_out else "ended", exit_code=code, text=text)
        text = f"process {self._pid} was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL and self._num_kills():
            text += f"; meanwhile the kernel killed a process for memory (counted by {self._counted_by()}){said}"
            return WatchEnd(seconds=seconds, how="out_of_memory", exit_code=code, text=text)
        return WatchEnd(seconds=seconds, how="killed", exit_code=code, text=text + said)

    def _said(self) -> str:
        """Return the run's status, last step and message as text; "" if no run is watched."""
        progress = None if self._follower is None else self._follower.progress()
        if progress is None:
            return ""
        message = f": {progress.message}" if progress.message else ""
        state = progress.status if progress.status != "running" else "not finished"
        return f"the run is {state} at step {progress.step:,}{message}"

    def _budget_lines(self, processes: tuple[ProcessUse, ...], run: RunProgress | None) -> list[Line]:
        return [] if self._follower is None or run is None else self._follower.budget_lines(processes, run)

    def _foreseen(self, seconds: float, line: Line) -> Line:
        forecast = self._forecasts.setdefault(line.name, Forecast())
        left = forecast.seconds_left(seconds, line)
        return line if left is None else line.model_copy(update={"seconds_left": left})

    def _num_kills(self) -> int | None:
        before, now = self._kills_before, self._kills.read()
        if before is None or now is None or before.is_whole_machine != now.is_whole_machine:
            return None  # the group was deleted with its last process
        return now.number - before.number

    def _counted_by(self) -> str:
        return "the machine" if self._kills_before and self._kills_before.is_whole_machine else "its control group"


def _signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def watch_of(run: Path | None, pid: int | None) -> Watch:
    """Return the watch of a run directory, of a process, or of this machine.

    Raises:
        InputError: if the process has ended, the folder is not a run directory, or the run has no process on this
            machine.
    """
    if run is None:
        return Watch(pid)
    if not (run / "metrics.jsonl").is_file():
        raise InputError(
            f"{run} is not a run directory (it has no metrics.jsonl): give the --out of `plimsoll train`, or --pid"
        )
    directory = RunDirectory(run)
    found = directory.command_pid() or directory.training_pid()
    if found is None:
        raise InputError(_over(run, Follower(directory).progress()))
    return Watch(found, directory)


def _over(run: Path, progress: RunProgress) -> str:
    """Return the message for a run that cannot be watched: the reason, and the command to use instead."""
    if progress.status in {"finished", "interrupted", "failed"}:
        return (
            f"the run in {run} is over ({progress.status} at step {progress.step:,}), so there is nothing to watch: "
            f"see `plimsoll report {run}`"
        )
    return (
        f"no process of the run in {run} is on this machine (at step {progress.step:,}): start `plimsoll watch` where "
        f"it runs; if it was killed, resume it with `plimsoll train --resume --out {run}`"
    )
