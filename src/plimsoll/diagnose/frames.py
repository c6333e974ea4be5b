"""The frames of the user's code where an error was raised: those of its traceback, and their callers.

A frame is the user's where its file is in no installed package, not in Python's library and not in this package.
"""

from __future__ import annotations

import linecache
import os
from types import FrameType, TracebackType
from typing import NamedTuple

from plimsoll.device.oom_errors import is_users

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Line(NamedTuple):
    """A line of the user's that was running; ``place`` is ``file.py:12``."""

    frame: FrameType
    number: int

    @property
    def place(self) -> str:
        """The file, from the current folder where it is below that, and the line."""
        path = self.frame.f_code.co_filename
        here = os.path.relpath(path)
        return f"{path if here.startswith(os.pardir) else here}:{self.number}"

    @property
    def code(self) -> str:
        """The text of the line; "" where its file is gone."""
        return linecache.getline(self.frame.f_code.co_filename, self.number).strip()[:200]


def frames_of(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return every frame of a traceback with the line it was at, the innermost first."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found[::-1]


def users_lines(frames: list[tuple[FrameType, int]]) -> list[Line]:
    """Return the user's among frames."""
    return [Line(frame, number) for frame, number in frames if _is_users_frame(frame)]


def users_callers(frame: FrameType | None) -> list[Line]:
    """Return the user's frames among a frame and those that called it, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return users_lines(found)


def _is_users_frame(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return is_users(path) and not path.startswith(_OWN_FOLDER)
