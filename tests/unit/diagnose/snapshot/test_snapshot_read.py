"""Snapshots of every form that torch writes, and files that are not snapshots."""

import gzip
import io
import pickle

import pytest

from plimsoll.diagnose.snapshot.read import is_snapshot, read_snapshot, snapshot_of
from plimsoll.errors import InputError
from snapshots import MIB, USER, Allocator, training, write


def read(content):
    return snapshot_of(io.BytesIO(pickle.dumps(content)), "a.pickle")


def segment(**fields):
    return {"device": 0, "address": 100, "total_size": 64, "stream": 0, "blocks": []} | fields


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(tmp_path, protocol):
    snapshot = read_snapshot(write(tmp_path / "a.pickle", training(2).as_dict(), protocol))
    used = [block for one in snapshot.segments for block in one.blocks if block.is_used]
    assert sum(block.asked_bytes for block in used) == (4 + 8) * 4 * MIB
    assert {block.site.place for block in used} == {"train.py:3", "train.py:15"}
    assert len(snapshot.traces[0]) == len(training(2).events)
    assert snapshot.settings["expandable_segments"] is False


def test_compressed(tmp_path):
    path = tmp_path / "a.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(training(1).as_dict())))
    assert is_snapshot(path)
    assert read_snapshot(path).traces[0]
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputError, match="is damaged .*: write the snapshot again"):
        read_snapshot(path)


def test_frames_in_the_history_of_a_block():
    history = [{"addr": 100, "real_size": 60, "frames": [USER[5]]}, {"addr": 100, "real_size": 64, "frames": []}]
    blocks = [{"size": 64, "state": "active_allocated", "history": history}]
    (block,) = read({"segments": [segment(blocks=blocks)]}).segments[0].blocks
    assert (block.address, block.asked_bytes, block.site.place) == (100, 60, "train.py:5")


def test_blocks_without_addresses_and_segments_alone():
    blocks = [{"size": 10, "state": "active_allocated"}, {"size": 54, "state": "inactive"}]
    (one,) = read([segment(blocks=blocks, segment_pool_id=(0, 1))]).segments
    assert one.is_private
    assert [(block.address, block.asked_bytes, block.is_used) for block in one.blocks] == [
        (100, 10, True),
        (110, 0, False),
    ]


def test_an_empty_one():
    snapshot = read(Allocator().as_dict())
    assert (snapshot.segments, snapshot.traces) == ((), ([],))


SAME: list[object] = []
BLOCK = {"size": 1, "state": "inactive"}
BLOCKS = [BLOCK]
ODD = {
    "a list": [1],
    "a number": 1,
    "a dict of something else": {"model": [], "x" * 1000: 0},
    "segments that are none": {"segments": 3},
    "a segment that is none": {"segments": [3]},
    "a segment without size": {"segments": [{"blocks": []}]},
    "a segment of a text": {"segments": [segment(total_size="64")]},
    "a segment below nothing": {"segments": [segment(total_size=-1)]},
    "no blocks": {"segments": [segment(blocks=None)]},
    "a block that is none": {"segments": [segment(blocks=[3])]},
    "a block without state": {"segments": [segment(blocks=[{"size": 1}])]},
    "a state that is a list": {"segments": [segment(blocks=[{"size": 1, "state": []}])]},
    "blocks larger than their segment": {"segments": [segment(blocks=[BLOCK | {"size": 65}])]},
    "the same blocks twice": {"segments": [segment(blocks=BLOCKS), segment(blocks=BLOCKS)]},
    "a device far off": {"segments": [segment(device=256)]},
    "many devices": {"segments": [], "device_traces": [[] for _ in range(257)]},
    "sizes that overflow": {
        "segments": [],
        "device_traces": [[{"action": "alloc", "addr": a, "size": 1 << 62} for a in (0, 1)]],
    },
    "traces that are none": {"segments": [], "device_traces": {"a": 1}},
    "a trace that is none": {"segments": [], "device_traces": [3]},
    "an event that is none": {"segments": [], "device_traces": [[3]]},
    "an event of a text": {"segments": [], "device_traces": [[{"action": "alloc", "addr": 0, "size": "x"}]]},
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_snapshot_is_refused(what):
    with pytest.raises(InputError, match="torch.cuda.memory._dump_snapshot") as refused:
        read(ODD[what])
    assert len(str(refused.value)) < 300


def test_which_files_are_snapshots(tmp_path):
    assert is_snapshot(write(tmp_path / "a", {}))
    for name, content in {"log": b"out of memory", "empty": b"", "one": b"\x80", "torn": b"\x1f\x8b"}.items():
        (tmp_path / name).write_bytes(content)
        assert not is_snapshot(tmp_path / name)
    (tmp_path / "log.gz").write_bytes(gzip.compress(b"a log"))
    assert not is_snapshot(tmp_path / "log.gz")
    assert not is_snapshot(tmp_path)
    with pytest.raises(InputError, match="cannot read .* give a memory snapshot"):
        read_snapshot(tmp_path / "none")
