"""What was live at the peak, by what it is for."""

import io
import pickle

import pytest

from plimsoll.diagnose.snapshot.peak import shares_at
from plimsoll.diagnose.snapshot.read import snapshot_of
from plimsoll.diagnose.snapshot.replay import replay
from snapshots import ADAM, BACKWARD, ENGINE, FORWARD, MIB, USER, Allocator, training


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
