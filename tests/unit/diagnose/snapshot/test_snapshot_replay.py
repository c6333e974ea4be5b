"""Replayed allocator events, compared with numbers calculated by hand.

The tests also cover the live memory at the peak, by purpose.
"""

import io
import pickle

import pytest

from plimsoll.diagnose.snapshot.read import snapshot_of
from plimsoll.diagnose.snapshot.replay import FROM_BEFORE, NEVER, replay, shares_at
from snapshots import ADAM, BACKWARD, ENGINE, FORWARD, MIB, USER, Allocator, training


def played(allocator, first_event=0):
    content = allocator.as_dict()
    content["device_traces"][allocator.device] = allocator.events[first_event:]
    return replay(snapshot_of(io.BytesIO(pickle.dumps(content)), "a"), allocator.device)


def test_live_and_reserved_over_time():
    device = Allocator()
    first = device.alloc(3 * MIB, USER[1])  # events 0, 1: a segment of 4 MiB
    second = device.alloc(5 * MIB, USER[2])  # 2, 3: a segment of 6 MiB
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
    # The line of code is known for blocks that still exist. For freed ones only the size is known.
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


def shares(allocator, event=None):
    found = replay(snapshot_of(io.BytesIO(pickle.dumps(allocator.as_dict())), "a"), 0)
    return shares_at(found, found.top_event if event is None else event)


def test_a_training():
    found = shares(training(3))
    assert [(share.category, share.num_bytes // MIB, share.place) for share in found] == [
        ("optimizer states", 32, "train.py:15"),
        ("activations", 24, "train.py:10"),
        ("gradients", 16, ""),
        ("parameters", 16, "train.py:3"),
    ]
    assert {share.known for share in found} == {"assumed"}


@pytest.mark.parametrize(
    ("made", "freed", "category"),
    [
        (FORWARD, BACKWARD, "activations"),
        (FORWARD, FORWARD, "temporaries"),
        (ENGINE, BACKWARD, "temporaries"),
        (ENGINE, ADAM, "gradients"),
        (ADAM, ADAM, "temporaries"),
        (USER[1], BACKWARD, "activations"),
        (USER[1], USER[2], "unknown"),
    ],
)
def test_where_it_is_freed_tells_what_it_was(made, freed, category):
    device = Allocator()
    device.free(device.alloc(MIB, made), freed)
    assert [share.category for share in shares(device)] == [category]


def test_many_lines_end_in_others():
    device = Allocator()
    for line in range(1, 31):
        device.alloc(line * MIB, USER[line])
    found = shares(device)
    assert len(found) == 13
    assert (found[-1].category, found[-1].num_bytes) == ("others", sum(range(1, 19)) * MIB)
    assert sum(share.num_bytes for share in found) == sum(range(31)) * MIB
