"""Monitoring of a training run: a memory sampler and a live view.

The sampler is a thread that reads the used memory 20 times per second (`benchmarks/overhead.py` measures the overhead).
The training thread draws the view between two steps, at most four times per second. A separate drawing thread could run
out of memory in the middle of a step, and its error would be lost.

On a terminal the view is a live panel. Elsewhere (a log, CI) it is a line every few seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from rich.live import Live

from plimsoll.device.base import Backend
from plimsoll.records.device import MemoryUse
from plimsoll.records.run import StepLine
from plimsoll.report.as_text import live_panel, progress_line
from plimsoll.report.console import StandardError
from plimsoll.report.progress import spinner
from plimsoll.step.oom_boundary import Position, attempt

_SAMPLE_SECONDS = 0.05
_DRAW_SECONDS = 0.25
_LINE_SECONDS = 5.0
_SAMPLES_PER_STEP = 8


class MemorySampler:
    """A thread that records ``backend.use().used_bytes`` and the time, 20 times per second.

    Args:
        backend: backend of the device.
        offset_seconds: duration of the run before this process started.
    """

    def __init__(self, backend: Backend, offset_seconds: float = 0.0) -> None:
        self._backend = backend
        self._started = time.monotonic() - offset_seconds
        self._samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plimsoll-memory", daemon=True)

    @contextmanager
    def running(self) -> Iterator[MemorySampler]:
        """Sample while the block runs."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            attempt(self.sample, self._backend, Position())  # near the limit even a sample may fail; it is skipped

    def sample(self) -> None:
        """Record the used memory once."""
        self._samples.append((self.seconds(), self._backend.use().used_bytes))

    def seconds(self) -> float:
        """Return the seconds since the start of the run, including the time before a restart."""
        return time.monotonic() - self._started

    def drain(self) -> tuple[tuple[float, int], ...]:
        """Return the samples recorded since the last call, thinned to at most eight: pairs of seconds and bytes."""
        samples, self._samples = self._samples, []
        return thinned(samples, _SAMPLES_PER_STEP)


def thinned(samples: list[tuple[float, int]], num_kept: int) -> tuple[tuple[float, int], ...]:
    """Thin samples by keeping the sample with the most bytes in each of ``num_kept`` equal parts.

    Args:
        samples: pairs of seconds and bytes, in order of time.
        num_kept: largest number of samples to return.
    """
    if len(samples) <= num_kept:
        return tuple(samples)
    bounds = [len(samples) * part // num_kept for part in range(num_kept + 1)]
    return tuple(max(samples[a:b], key=lambda sample: sample[1]) for a, b in pairwise(bounds))


class View:
    """The live view on standard error.

    Args:
        name: name of the run.
        num_steps: number of steps of the job.
        unit_name: ``"samples"`` or ``"tokens"``.
        quiet: print and draw nothing.
    """

    def __init__(self, name: str, num_steps: int, unit_name: str, quiet: bool = False) -> None:
        self._name = name
        self._num_steps = num_steps
        self._unit_name = unit_name
        self._quiet = quiet
        self._console = StandardError()
        self._live: Live | None = None
        self._drawn = 0.0
        self._first: StepLine | None = None
        self._until_first = ExitStack()

    @contextmanager
    def shown(self) -> Iterator[View]:
        """Show the view while the block runs."""
        with ExitStack() as stack, ExitStack() as self._until_first:
            if not self._quiet and self._console.is_terminal:
                self._live = stack.enter_context(Live(console=self._console, auto_refresh=False, transient=True))
            self._until_first.enter_context(spinner(self._quiet, "the first step"))
            yield self

    def say(self, text: str) -> None:
        """Print a line that stays above the live view."""
        if not self._quiet:
            self._console.print(text, highlight=False, markup=False)

    def update(self, line: StepLine, memory: dict[str, MemoryUse]) -> None:
        """Show a completed step, unless the view was drawn less than 0.25 s (terminal) or 5 s (log) ago.

        Args:
            line: the step.
            memory: memory use of ``device`` and, if the device is not the CPU, of ``host``.
        """
        self._until_first.close()
        self._first = self._first or line
        is_last = line.step == self._num_steps
        every_seconds = _DRAW_SECONDS if self._live is not None else _LINE_SECONDS
        if self._quiet or (time.monotonic() - self._drawn < every_seconds and not is_last):
            return
        self._drawn = time.monotonic()
        eta_seconds = self._eta_seconds(line)
        if self._live is None:
            use = memory["device"]
            text = progress_line(
                line, self._num_steps, use.limit_bytes, use.used_bytes, eta_seconds, unit_name=self._unit_name
            )
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            panel = live_panel(self._name, line, self._num_steps, memory, eta_seconds, unit_name=self._unit_name)
            self._live.update(panel, refresh=True)

    def _eta_seconds(self, line: StepLine) -> float | None:
        """Return the remaining seconds, extrapolated from the steps after the first; ``None`` after the first step.

        The first step is left out, because it includes the warm-up.
        """
        assert self._first is not None
        num_steps = line.step - self._first.step
        if num_steps == 0:
            return None
        return (line.time_seconds - self._first.time_seconds) / num_steps * (self._num_steps - line.step)
