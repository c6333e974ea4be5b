"""Events played again, against numbers by hand."""

import io
import pickle

import pytest

from plimsoll.diagnose.snapshot.read import snapshot_of
from plimsoll.diagnose.snapshot.replay import FROM_BEFORE, NEVER, replay
from snapshots import MIB, USER, Allocator


def played(allocator, first_event=0):
    content = allocator.as_dict()
    content["device_traces"][allocator.device] = allocator.events[first_event:]
    return replay(snapshot_of(io.BytesIO(pickle.dumps(content)), "a"), allocator.device)


def test_live_and_reserved_over_time():
    device = Allocator()
    first = device.alloc(3 * MIB, USER[1])  # events 0, 1: a segment of 4 MiB
    second = device.alloc(5 * MIB, USER[2])  # 2, 3: one of 6
    device.free(first)  # 4, 5
    device.alloc(1 * MIB, USER[3])  # 6
    device.free(second)  # 7, 8
    found = played(device)
    assert [size // MIB for size in found.live_bytes] == [0, 3, 3, 8, 5, 5, 6, 1, 1]
    assert [size // MIB for size in found.reserved_bytes] == [4, 4, 10, 10, 10, 10, 10, 10, 10]
    assert (found.top_event, found.peak_bytes) == (3, 8 * MIB)
    assert [(piece.born, piece.freed, piece.site.place) for piece in found.live_at(3)] == [
        (1, 4, "train.py:1"),
        (3, 7, "train.py:2"),
    ]


def test_what_was_there_before_the_first_event():
    device = Allocator()
    kept = device.alloc(3 * MIB, USER[1])
    freed = device.alloc(5 * MIB, USER[2])
    num_before = len(device.events)
    device.free(freed)
    device.alloc(1 * MIB, USER[3])
    found = played(device, num_before)
    assert [size // MIB for size in found.live_bytes] == [3, 3, 4]
    assert (found.top_event, found.peak_bytes) == (FROM_BEFORE, 8 * MIB)
    # Of what is left the block tells its line; of what was freed only its size is known.
    assert sorted((piece.num_bytes // MIB, piece.freed, piece.site.place) for piece in found.live_at(FROM_BEFORE)) == [
        (3, NEVER, "train.py:1"),
        (5, 0, ""),
    ]
    assert kept != freed


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_kinds_of_events_that_were_not_recorded(left_out):
    device = Allocator()
    device.free(device.alloc(3 * MIB))
    device.free(device.alloc(2 * MIB))
    device.events = [event for event in device.events if event["action"] != left_out]
    found = played(device)
    assert (found.peak_bytes, found.live_bytes[-1], found.before) == (3 * MIB, 0, ())


def test_no_events():
    device = Allocator()
    device.alloc(3 * MIB)
    found = played(device, len(device.events))
    assert (found.top_event, found.peak_bytes, found.oom_event) == (FROM_BEFORE, 3 * MIB, None)


def test_the_last_oom():
    device = Allocator()
    device.oom(9, 1)
    device.oom(8, 2)
    device.alloc(3 * MIB)
    assert played(device).oom_event == 1
