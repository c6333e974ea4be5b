"""The line on a terminal that says what is being done and for how long: a program of its own, which imports nothing.

    python -I -S ticker.py "loading torch"      # then each line on standard input is what is done from now on

The process that works cannot draw it: while it loads a library, no thread of it runs. The line stands below the one
with the cursor, where others print, and is gone when standard input ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

_DRAW_SECONDS = 0.1
_FIRST_SECONDS = 0.1  # what takes less than that is not said
_CLEAR_BELOW = "\x1b[J"
_USUAL_COLUMNS = 80


def drawn(stage: str, stage_seconds: float, all_seconds: float, num_columns: int) -> str:
    """Return the line: the stage, cut where the terminal is too narrow for it, its seconds, and those of all stages."""
    seconds = f"  {stage_seconds:.1f} s"
    if all_seconds - stage_seconds >= _DRAW_SECONDS:
        seconds += f" of {all_seconds:.1f} s"
    return stage[: max(num_columns - 1 - len(seconds), 0)] + seconds


def main() -> None:
    """Draw until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that works is interrupted, and ends this one
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # of a terminal that only one group may write to
    stage, begun, rest = sys.argv[1], time.monotonic(), b""
    since, wait_seconds = begun, _FIRST_SECONDS
    while True:
        if select.select([0], [], [], wait_seconds)[0]:
            text = os.read(0, 1 << 16)
            if not text:
                break
            *lines, rest = (rest + text).split(b"\n")
            if lines:
                stage, since = lines[-1].decode(errors="replace"), time.monotonic()
        now = time.monotonic()
        wait_seconds = _DRAW_SECONDS
        if now - begun >= _FIRST_SECONDS:
            _write(f"{_CLEAR_BELOW}\n{drawn(stage, now - since, now - begun, _num_columns())}\x1b[A\r")
    _write(_CLEAR_BELOW)


def _num_columns() -> int:
    with suppress(OSError):
        return os.get_terminal_size(2).columns or _USUAL_COLUMNS
    return _USUAL_COLUMNS


def _write(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        os.write(2, text.encode())


if __name__ == "__main__":
    main()
