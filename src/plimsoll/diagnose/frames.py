"""Frames of user code at an error: frames in its traceback, and their callers.

A frame is user code if its file is outside installed packages, the standard library and this package.
"""

from __future__ import annotations

import linecache
import os
from types import FrameType, TracebackType
from typing import NamedTuple

from plimsoll.device.oom_errors import is_users

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Line(NamedTuple):
    """A line of user code that is running.

    Attributes:
        frame: the frame of the line.
        number: the line number.
    """

    frame: FrameType
    number: int

    @property
    def place(self) -> str:
        """The file and line as ``file.py:12``. The path is relative if the file is below the current folder."""
        path = self.frame.f_code.co_filename
        here = os.path.relpath(path)
        return f"{path if here.startswith(os.pardir) else here}:{self.number}"

    @property
    def code(self) -> str:
        """The source text of the line; "" if the file cannot be read."""
        return linecache.getline(self.frame.f_code.co_filename, self.number).strip()[:200]


def frames_of(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return every frame of a traceback with its current line, innermost first."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found[::-1]


def users_lines(frames: list[tuple[FrameType, int]]) -> list[Line]:
    """Return the running lines of those frames that are user code, in the order of the frames."""
    return [Line(frame, number) for frame, number in frames if _is_users_frame(frame)]


def users_callers(frame: FrameType | None) -> list[Line]:
    """Return the running lines of user code in a frame and its callers, innermost first."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return users_lines(found)


def _is_users_frame(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return is_users(path) and not path.startswith(_OWN_FOLDER)
