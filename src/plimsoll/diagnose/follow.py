"""A watch gone through to its end: every sample noted, written and shown, until something ends it.

seen = follow(watch, every_seconds=2.0, num_samples=None, record=None, show=print)
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from plimsoll.diagnose.watch import Watch
from plimsoll.records.watch import WatchSample, append


def follow(
    watch: Watch,
    *,
    every_seconds: float,
    num_samples: int | None,
    record: Path | None,
    show: Callable[[WatchSample], None],
    keeps_samples: bool = False,
) -> Seen:
    """Look until what is watched has ended, so many times, or until Ctrl-C or SIGTERM.

    Args:
        watch: what is looked at.
        every_seconds: between samples.
        num_samples: how many; ``None`` for all.
        record: the file of a watch that was begun, to which samples are added.
        show: shows a sample.
        keeps_samples: whether all of them are kept, which fills memory.

    Raises:
        InputError: see `Watch.samples`.
        RecordError: see `Watch.samples`.
    """
    seen = Seen(keeps_samples)
    with seen.until_interrupted():
        for sample in watch.samples(every_seconds, num_samples):
            with _undisturbed():
                if record is not None:
                    append(record, sample)
                seen.note(sample)
            show(sample)
    return seen


@dataclass
class Seen:
    """What was seen; all samples are kept only to be printed, they would fill memory."""

    keeps_samples: bool
    samples: list[WatchSample] = field(default_factory=list)
    has_warned: bool = False
    interrupted_by: int | None = None

    def note(self, sample: WatchSample) -> None:
        """Take note of a sample."""
        self.has_warned |= bool(sample.warnings)
        if self.keeps_samples:
            self.samples.append(sample)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the block, and nothing else."""

        def stop(number: int, _: FrameType | None) -> None:
            self.interrupted_by = number
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted_by = self.interrupted_by or signal.SIGINT
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM wait for the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
