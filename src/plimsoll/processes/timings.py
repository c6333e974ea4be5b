"""Recording of the elapsed time of each process and each of its stages, which ``--timings`` prints.

    begin()                         # in the command; its child processes inherit it
    with timed("building the model"):
        ...
    end()                           # in each process; the command prints the table

Each process appends one line per stage to a file named by an environment variable. Without ``--timings``, nothing is
recorded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FILE, _COMMAND = "PLIMSOLL_TIMINGS", "PLIMSOLL_TIMINGS_OF"
_WHOLE = ""  # the stage name of the whole process


def begin(prefix: str = "plimsoll-") -> None:
    """Start recording in this process and its children.

    Args:
        prefix: the start of the name of the temporary file.
    """
    number, path = tempfile.mkstemp(prefix=prefix)
    os.close(number)
    os.environ |= {_FILE: path, _COMMAND: str(os.getpid())}


def note(stage: str, seconds: float) -> None:
    """Record the duration of a stage of this process. The part of ``stage`` before the first colon is its name."""
    path = os.environ.get(_FILE)
    if path is not None:
        line = {"process": _process_name(), "stage": stage.partition(":")[0], "seconds": seconds}
        with suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Record the duration of the block as a stage of this process."""
    begun = time.monotonic()
    try:
        yield
    finally:
        note(stage, time.monotonic() - begun)


def end() -> None:
    """Record the age of this process. The process that called `begin` also prints the table on standard error."""
    path = os.environ.get(_FILE)
    if path is None:
        return
    note(_WHOLE, _seconds_of_process())
    if os.environ[_COMMAND] == str(os.getpid()):
        del os.environ[_FILE], os.environ[_COMMAND]
        with suppress(OSError):
            print(table(Path(path).read_text(encoding="utf-8")), file=sys.stderr)
            os.unlink(path)


def table(text: str) -> str:
    """Return a table of the recorded durations in seconds, by process and stage, in the order of recording.

    Args:
        text: the recorded lines, as JSON.
    """
    seconds: dict[str, dict[str, float]] = {}
    for line in map(json.loads, text.splitlines()):
        stages = seconds.setdefault(line["process"], {})
        stages[line["stage"]] = stages.get(line["stage"], 0.0) + line["seconds"]
    lines = ["seconds  where"]
    for process, stages in seconds.items():
        whole_seconds = stages.pop(_WHOLE, sum(stages.values()))  # a killed process has not recorded it
        lines.append(f"{whole_seconds:7.1f}  {process}")
        lines += [f"{spent:7.1f}    {stage}" for stage, spent in stages.items()]
    return "\n".join(lines)


def _process_name() -> str:
    """Return the name of this process in the table: ``plimsoll`` and the subcommand."""
    return " ".join(["plimsoll", *sys.argv[1:2]])


def _seconds_of_process() -> float:
    """Return the seconds since the start or fork of this process; see proc(5)."""
    with suppress(OSError):
        ticks = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.process_time()
