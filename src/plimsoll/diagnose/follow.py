"""The loop of ``plimsoll watch``: every sample is recorded and shown until the watch ends.

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
    """Take samples until the watched processes end, `num_samples` are taken, or Ctrl-C or SIGTERM arrives.

    Args:
        watch: the watch to sample.
        every_seconds: seconds between samples.
        num_samples: number of samples; ``None`` for no limit.
        record: file of a recording, to which samples are appended. Its first line must already be written.
            ``None`` records nothing.
        show: callback that shows a sample.
        keeps_samples: whether the result contains all samples.

    Returns:
        whether a sample had warnings, the samples if kept, and the signal that ended the watch.

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
    """The results of a watch. Samples are kept only on request, because a long watch would fill memory with them."""

    keeps_samples: bool
    samples: list[WatchSample] = field(default_factory=list)
    has_warned: bool = False
    interrupted_by: int | None = None

    def note(self, sample: WatchSample) -> None:
        """Record whether a sample has warnings. Also store the sample if ``keeps_samples`` is set."""
        self.has_warned |= bool(sample.warnings)
        if self.keeps_samples:
            self.samples.append(sample)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Run the block; Ctrl-C or SIGTERM ends it and is stored in `interrupted_by`. Other exceptions propagate."""

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
    """Delay Ctrl-C and SIGTERM until the block has ended, so that they cannot interrupt it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
