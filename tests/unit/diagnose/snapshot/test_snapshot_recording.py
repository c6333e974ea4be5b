"""Recorded frames, converted to places and phases, and events, converted to rows of numbers."""

import pytest

from plimsoll.diagnose.snapshot.recording import ALLOC, OOM, OTHER, EventRow, Recording
from snapshots import ADAM, BACKWARD, ENGINE, FORWARD, TO, USER


def site(*frames):
    recording = Recording()
    return recording.of_list([recording.of_dict(dict(frame)) for frame in frames])


@pytest.mark.parametrize(
    ("frames", "place", "phase"),
    [
        ((FORWARD, USER[7]), "train.py:7", "forward"),
        ((TO, USER[7]), "train.py:7", "parameters"),
        ((ADAM, USER[7]), "train.py:7", "optimizer"),
        ((BACKWARD, USER[7]), "train.py:7", "backward"),
        ((ENGINE,), "", "backward"),
        ((USER[7], USER[9]), "train.py:7", ""),
        # A closure that an optimizer calls, and a forward pass that is repeated in the backward pass.
        ((FORWARD, USER[7], ADAM, USER[9]), "train.py:7", "forward"),
        ((FORWARD, ENGINE, BACKWARD, USER[9]), "train.py:9", "forward"),
    ],
)
def test_the_innermost_frame_that_tells_counts(frames, place, phase):
    found = site(*frames)
    assert (found.place, found.phase) == (place, phase)


@pytest.mark.parametrize(
    ("filename", "is_users"),
    [
        ("/home/me/model.py", True),
        ("<ipython-input-3-abc>", True),
        ("/var/ipykernel_12/345.py", True),
        ("C:\\work\\train.py", True),
        ("/usr/lib/python3.12/threading.py", False),
        ("/venv/lib/python3.12/site-packages/transformers/trainer.py", False),
        ("/opt/pytorch/torch/nn/functional.py", False),
        ("/var/torchinductor_me/ab/cab.py", False),
        ("<frozen runpy>", False),
        ("<eval_with_key>.1", False),
        ("CUDACachingAllocator.cpp", False),
        ("??", False),
    ],
)
def test_which_frames_are_the_users(filename, is_users):
    found = site({"filename": filename, "line": 3, "name": "f"})
    assert found.place == (f"{filename}:3" if is_users else "")


def test_a_name_cannot_write_to_the_terminal():
    assert site({"filename": "\x1b[2Ja\n.py", "line": 3, "name": "f"}).place == "\ufffd[2Ja\ufffd.py:3"


def test_events_become_rows():
    recording = Recording()
    stack = recording.of_list([recording.of_dict(dict(USER[7]))])
    rows = [
        recording.of_dict({"action": "alloc", "addr": 512, "size": 10, "stream": 0, "time_us": 5, "frames": stack}),
        recording.of_dict({"action": "oom", "device_free": 99, "size": 20, "frames": []}),
        recording.of_dict({"action": "of tomorrow", "size": 1}),
    ]
    columns = recording.columns
    assert rows == [0, 1, 2]
    assert all(type(row) is EventRow for row in rows)
    assert list(columns.actions) == [ALLOC, OOM, OTHER]
    assert list(columns.addresses) == [512, 99, 0]
    assert list(columns.sizes) == [10, 20, 1]
    assert [recording.sites[index].place for index in columns.sites] == ["train.py:7", "", ""]


@pytest.mark.parametrize(
    "field", [{"size": -1 - (1 << 63)}, {"size": 1 << 64}, {"size": "1"}, {"addr": 1.0}, {"addr": 1 << 64}]
)
def test_an_event_of_other_numbers_is_none(field):
    event = {"action": "alloc", "addr": 0, "size": 1} | field
    assert Recording().of_dict(event) is event


def test_a_request_beyond_all_bounds_is_a_number():
    """Python records 16 EiB less one byte, and so does torch's C++ writer."""
    recording = Recording()
    for size in ((1 << 64) - 1, -1):
        recording.of_dict({"action": "oom", "device_free": 1, "size": size})
    assert list(recording.columns.sizes) == [(1 << 64) - 1] * 2


def test_other_dicts_and_lists_are_left():
    recording = Recording()
    for one in ({"a": 1}, {"filename": 3}, {"filename": "a.py", "line": "1"}):
        assert recording.of_dict(one) is one
    numbers = [1, 2]
    assert recording.of_list(numbers) is numbers
    assert recording.of_list([]) == []
    assert recording.site_of(numbers) is recording.unknown
