"""The user's frames of a traceback."""

import sys

import torch

from plimsoll.diagnose.frames import frames_of, users_callers, users_lines


def test_the_innermost_line_of_the_user_is_first():
    try:
        torch.nn.Linear(3, 4)(torch.zeros(2, 5))
    except RuntimeError as error:
        frames = frames_of(error.__traceback__)
    (line,) = users_lines(frames)
    assert len(frames) > 2
    assert line.place.endswith(f"test_diagnose_frames.py:{line.number}")
    assert line.code == "torch.nn.Linear(3, 4)(torch.zeros(2, 5))"


def test_callers_are_found_from_a_frame():
    def inner():
        return users_callers(sys._getframe())

    names = [line.frame.f_code.co_name for line in inner()]
    assert names[:2] == ["inner", "test_callers_are_found_from_a_frame"]


def test_nothing_is_found_in_nothing():
    assert frames_of(None) == []
    assert users_callers(None) == []
