"""The input of ``plimsoll explain``: a path or standard input. Large texts are read with a progress bar."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from plimsoll.diagnose.explain import explain
from plimsoll.diagnose.of_text import diagnosis_of_text
from plimsoll.diagnose.snapshot.read import is_snapshot
from plimsoll.errors import InputError
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.watch import is_recording
from plimsoll.report.progress import spinner, stages

STANDARD_INPUT = Path("-")

_LARGE_BYTES = 32 << 20  # read in about a second
_HEAD_BYTES = 1 << 12


def explain_source(source: Path, device: str | None, limit_bytes: int | None, quiet: bool) -> Diagnosis:
    """Explain a job, a run, a recording, a snapshot or a text, with progress on standard error.

    Args:
        source: see `plimsoll.diagnose.explain.explain`; ``-`` reads standard input.
        device: device to train on; ``None`` for the job's device.
        limit_bytes: bytes that the training may use; ``None`` for the job's budget, or all available memory.
        quiet: whether to hide the progress.

    Raises:
        InputError: if standard input is a terminal, or the source cannot be used.
    """
    if source == STANDARD_INPUT:
        if sys.stdin.isatty():
            raise InputError(f"{source} reads standard input, which is a terminal here: give a run directory or a file")
        stream = cast(io.BufferedReader, sys.stdin.buffer)
        with _spooled(stream) as path:
            return diagnosis_of_text(stream, "standard input") if path is None else explain(path)
    is_long = source.is_file() and source.stat().st_size > _LARGE_BYTES
    if is_long and not is_recording(source) and not is_snapshot(source):
        num_bytes = source.stat().st_size
        with stages(quiet) as report, source.open("rb") as file:
            return diagnosis_of_text(file, source.name, lambda done: report("reading", min(done, num_bytes), num_bytes))
    with spinner(quiet) as progress:
        return explain(source, device=device, budget=limit_bytes, progress=progress)


@contextmanager
def _spooled(stream: io.BufferedReader) -> Iterator[Path | None]:
    """Copy standard input to a temporary file and yield its path, if it is a snapshot or a recording.

    Yields ``None`` for a text, which can be read from the stream.
    """
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        path = Path(folder) / "standard input"
        path.write_bytes(stream.peek(_HEAD_BYTES))
        if not (is_snapshot(path) or is_recording(path)):
            yield None
            return
        with path.open("wb") as file:
            shutil.copyfileobj(stream, file)
        yield path
