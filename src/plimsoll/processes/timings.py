"""Where the seconds of a command went, in each of its processes, as ``--timings`` prints it.

    begin()                         # of the command, for all processes that it starts
    with timed("building the model"):
        ...
    end()                           # of each process; the command prints the table

Each process writes a line for each stage into one file, which the environment names. Costs nothing where nobody asked.
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
_WHOLE = ""  # the stage that is the whole process


def begin(prefix: str = "plimsoll-") -> None:
    """Have all processes of this command note where their seconds go.

    Args:
        prefix: of the file's name.
    """
    number, path = tempfile.mkstemp(prefix=prefix)
    os.close(number)
    os.environ |= {_FILE: path, _COMMAND: str(os.getpid())}


def note(stage: str, seconds: float) -> None:
    """Note that this process did something for so long; what is before a colon is the stage."""
    path = os.environ.get(_FILE)
    if path is not None:
        line = {"process": _process_name(), "stage": stage.partition(":")[0], "seconds": seconds}
        with suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Note how long the block takes."""
    begun = time.monotonic()
    try:
        yield
    finally:
        note(stage, time.monotonic() - begun)


def end() -> None:
    """Note how long this process ran; the one that was asked prints what all have noted on standard error."""
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
    """Draw what was noted: the seconds of each process and of its stages, in the order in which they came."""
    seconds: dict[str, dict[str, float]] = {}
    for line in map(json.loads, text.splitlines()):
        stages = seconds.setdefault(line["process"], {})
        stages[line["stage"]] = stages.get(line["stage"], 0.0) + line["seconds"]
    lines = ["seconds  where"]
    for process, stages in seconds.items():
        whole_seconds = stages.pop(_WHOLE, sum(stages.values()))  # one that was killed did not say it
        lines.append(f"{whole_seconds:7.1f}  {process}")
        lines += [f"{spent:7.1f}    {stage}" for stage, spent in stages.items()]
    return "\n".join(lines)


def _process_name() -> str:
    """The command, as it is typed."""
    return " ".join(["plimsoll", *sys.argv[1:2]])


def _seconds_of_process() -> float:
    """How long this process has been there, from its start or the fork; see proc(5)."""
    with suppress(OSError):
        ticks = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.process_time()
