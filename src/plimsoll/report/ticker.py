"""Status line with the current stage and its seconds, as a separate program that imports only the standard library.

    python -I -S ticker.py "loading torch"      # each line on standard input is the next stage

The working process cannot draw the line itself, because none of its threads runs while it loads a library. The line is
one row below the cursor, so that other output stays intact. It is removed when standard input ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

_DRAW_SECONDS = 0.1
_FIRST_SECONDS = 0.1  # shorter work draws nothing
_CLEAR_BELOW = "\x1b[J"
_USUAL_COLUMNS = 80


def drawn(stage: str, stage_seconds: float, all_seconds: float, num_columns: int) -> str:
    """Return the line: the stage, shortened to the terminal's width, its seconds, and the seconds of all stages."""
    seconds = f"  {stage_seconds:.1f} s"
    if all_seconds - stage_seconds >= _DRAW_SECONDS:
        seconds += f" of {all_seconds:.1f} s"
    return stage[: max(num_columns - 1 - len(seconds), 0)] + seconds


def main() -> None:
    """Draw the line until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the working process, which then ends this one
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # sent if only the foreground group may write (stty tostop)
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
    with suppress(OSError):  # the terminal may be closed
        os.write(2, text.encode())


if __name__ == "__main__":
    main()
