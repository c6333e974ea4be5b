"""Shared code of the parts of `make gpu`: their inputs, and how they report results.

A part runs in a separate process and writes lines of JSON as it proceeds, so that results survive if it is stopped. A
line is a row of the recording: a *check* (measured value, bound, and whether it holds), or a measurement.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.gpu.files import ROOT, read_recording

Row = dict[str, Any]
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Task:
    """The inputs of a part; on a CPU it runs the same code with small models.

    ``folder`` is for files of all parts of a command, ``recording`` is the recording so far, ``until`` a time of
    `time.monotonic`.
    """

    part: str
    device: str
    folder: Path
    recording: Path
    rows: Path
    until: float
    began: float = field(default_factory=time.monotonic)

    @property
    def is_tiny(self) -> bool:
        """True if there is no GPU, so that only the code is tried."""
        return self.device == "cpu"

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    @cached_property
    def recorded(self) -> list[Row]:
        """The rows of the recording at the first access."""
        rows: list[Row] = read_recording(self.recording)["runs"]
        return rows

    @cached_property
    def header(self) -> Row:
        found: Row = read_recording(self.recording)["header"]
        return found

    def say(self, row: Row) -> None:
        """Write a row for the recording."""
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def tell(self, text: str) -> None:
        """Print the current activity, with the seconds of the part so far."""
        print(f"    {self.part}, {time.monotonic() - self.began:.0f} s: {text}", flush=True)

    def check(self, what: str, measured: object, bound: object, ok: bool) -> None:
        """Record whether a value meets its bound."""
        self.say({
            "id": f"check:{self.part}:{what}", "kind": "check", "part": self.part, "what": what,
            "measured": str(measured), "bound": str(bound), "ok": bool(ok),
        })  # fmt: skip

    def check_on_card(self, what: str, measured: object, bound: object, ok: bool) -> None:
        """Record a check that is meaningful on a GPU only."""
        self.check(what, measured, *(("none on a processor", True) if self.is_tiny else (bound, ok)))

    def not_reached(self, what: str) -> None:
        """Record that the time did not suffice, which is not a fault."""
        self.say({"id": f"left:{self.part}:{what}", "kind": "left", "part": self.part, "what": what})


@dataclass
class Command:
    """A finished program of this repository; ``code`` is None if its time was over."""

    code: int | None
    output: str
    errors: str
    seconds: float = 0.0
    last_line: str = field(init=False)

    def __post_init__(self) -> None:
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        self.last_line = lines[-1][:200] if lines else "it said nothing"


def environment(task: Task, **more: str) -> dict[str, str]:
    """Return the environment of programs that a part starts: this source tree, and a cache that only this part uses."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PLIMSOLL_CACHE": str(task.folder / "known" / task.part)}
    return os.environ | own | {"HF_HUB_OFFLINE": "1"} | more


def run(
    task: Task, *words: str, most_seconds: float = float("inf"), enough: Callable[[], bool] = lambda: False
) -> Command:
    """Run this interpreter until it ends, or until the time of the part or of the program is over.

    When ``enough`` returns True, it is interrupted as by Ctrl-C.
    """
    started, is_told = time.monotonic(), False
    until = started + max(min(task.seconds_left, most_seconds), 1.0)
    name = " ".join(Path(word).name for word in words if word not in {"-m", "-c"})[:100]
    task.tell(name)
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment(task), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while time.monotonic() < until:
        try:
            output, errors = process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if not is_told and enough():
                process.send_signal(signal.SIGINT)
                is_told = True
        else:
            done = Command(process.returncode, output, errors, time.monotonic() - started)
            task.tell(f"exit code {done.code} in {done.seconds:.0f} s: {name}")
            return done
    process.terminate()  # a supervisor forwards the signal to its training
    try:
        output, errors = process.communicate(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    return Command(None, output, errors, time.monotonic() - started)
