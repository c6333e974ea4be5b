"""Leaks in a snapshot; temporary growth does not count as one."""

import io
import pickle

import pytest

from plimsoll.diagnose.snapshot.leaks import leak_findings, step_ends
from plimsoll.diagnose.snapshot.read import snapshot_of
from plimsoll.diagnose.snapshot.replay import replay
from snapshots import ADAM, FORWARD, MIB, USER, training


def played(allocator):
    return replay(snapshot_of(io.BytesIO(pickle.dumps(allocator.as_dict())), "a"), 0)


def test_a_leak_is_named_by_its_line_with_what_it_took():
    found = played(training(9, leak=3 * MIB))
    assert len(step_ends(found)) == 9
    (leak,) = leak_findings(found)
    assert (leak.cause, leak.place, leak.effect_bytes) == ("leak", "train.py:12", 8 * 3 * MIB)
    assert leak.title == "allocations of train.py:12 are not freed: 3.0 MiB per step"
    assert leak.evidence[0].text == "8 allocations of train.py:12, 24.0 MiB, were not freed, made in 8 of 8 steps"


def test_the_largest_lines_come_first_and_the_rest_are_counted():
    device = training(1)
    for _ in range(6):
        for line in range(20, 25):
            device.alloc(line * MIB, FORWARD, USER[line])
        device.free(device.alloc(MIB, ADAM, USER[15]))
    found = leak_findings(played(device))
    assert [leak.place for leak in found] == ["train.py:24", "train.py:23", "train.py:22"]
    assert found[0].evidence[1].text == "5 lines leak memory in this way"


@pytest.mark.parametrize(
    ("num_steps", "leak"),
    [(9, 0), (9, 512), (3, 3 * MIB), (0, 0)],
    ids=["no leak", "too small", "too few steps", "no step"],
)
def test_what_is_no_leak(num_steps, leak):
    assert leak_findings(played(training(num_steps, leak=leak))) == ()


def test_one_long_forward_pass_is_none():
    """Every layer saves its activations and frees a temporary, until memory runs out."""
    device = training(2)
    for _ in range(40):
        device.alloc(8 * MIB, FORWARD, USER[10])
        device.free(device.alloc(8 * MIB, FORWARD, USER[11]))
    device.oom(8 * MIB, 0, FORWARD, USER[10])
    assert leak_findings(played(device)) == ()


def test_what_is_kept_for_some_steps_and_then_freed_is_none():
    device = training(1)
    window: list[int] = []
    for _ in range(12):
        window.append(device.alloc(8 * MIB, FORWARD, USER[10]))
        if len(window) > 3:
            device.free(window.pop(0))
        device.free(device.alloc(MIB, ADAM, USER[15]))
    assert leak_findings(played(device)) == ()
