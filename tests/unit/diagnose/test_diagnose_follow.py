"""A watch from begin to end: each sample is written before it is shown, and signals can end it between samples."""

import os
import signal
from pathlib import Path

import pytest

from plimsoll.diagnose.follow import Seen, follow
from plimsoll.diagnose.watch import watch_of
from plimsoll.records.watch import WatchRecord, begin


def test_samples_are_written_shown_and_kept_only_where_asked(tmp_path: Path) -> None:
    file, shown = tmp_path / "watch.jsonl", []
    with watch_of(None, os.getpid()) as watch:
        begin(file, watch.head())
        asked = {"every_seconds": 0.01, "num_samples": 2, "show": shown.append}
        seen = follow(watch, record=file, keeps_samples=True, **asked)
        assert follow(watch, record=None, **asked).samples == []
    assert tuple(seen.samples) == WatchRecord.read(file).samples == tuple(shown[:2])
    assert (seen.has_warned, seen.interrupted_by) == (False, None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_is_known(number: signal.Signals) -> None:
    seen, before = Seen(keeps_samples=False), signal.getsignal(signal.SIGTERM)
    with seen.until_interrupted():
        signal.raise_signal(number)
        pytest.fail("it goes on")
    assert seen.interrupted_by == number
    assert signal.getsignal(signal.SIGTERM) == before
