"""Watching a run: memory sampled beside it, and a live view of where it is.

The sampler is a thread that reads one number 20 times a second (`benchmarks/overhead.py` measures what that costs).
Drawing is done by the training thread between two steps, at most four times a second: a drawing thread could run out of
memory in the middle of a step and would take its error with it.

On a terminal the view is a live panel; elsewhere (a log, CI) it is a line every few seconds.
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
    """Samples ``backend.use().used_bytes`` with the seconds since it was made."""

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
            attempt(self.sample, self._backend, Position())  # near the limit even a sample may not fit: it is left out

    def sample(self) -> None:
        """Take one sample now."""
        self._samples.append((self.seconds(), self._backend.use().used_bytes))

    def seconds(self) -> float:
        """Seconds since the run began, counting those before a restart."""
        return time.monotonic() - self._started

    def drain(self) -> tuple[tuple[float, int], ...]:
        """Return and forget the samples so far, at most eight: of each part the highest."""
        samples, self._samples = self._samples, []
        return thinned(samples, _SAMPLES_PER_STEP)


def thinned(samples: list[tuple[float, int]], num_kept: int) -> tuple[tuple[float, int], ...]:
    """At most ``num_kept`` of the samples, each the highest of an equal part, in order of time."""
    if len(samples) <= num_kept:
        return tuple(samples)
    bounds = [len(samples) * part // num_kept for part in range(num_kept + 1)]
    return tuple(max(samples[a:b], key=lambda sample: sample[1]) for a, b in pairwise(bounds))


class View:
    """The live view on standard error; ``quiet`` draws nothing."""

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
        """Show the step that has just happened, unless another was drawn a moment ago.

        Args:
            line: the step.
            memory: what is used, by the place: ``device``, and ``host`` where that is another.
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
        """From the pace since the first step seen, which leaves the warm-up out."""
        assert self._first is not None
        num_steps = line.step - self._first.step
        if num_steps == 0:
            return None
        return (line.time_seconds - self._first.time_seconds) / num_steps * (self._num_steps - line.step)
