"""The allocator's event record, read from a snapshot in torch's format. Without CUDA the record does not exist."""

import pytest
import torch

from plimsoll.memory.snapshot import AllocatorEvent, events_of, recorded

# The record of torch 2.11 for a block of 512 bytes, and for a block that another stream uses when it is freed.
TRACE = [
    {"action": "segment_alloc", "addr": 4096, "size": 2097152, "stream": 0, "frames": []},
    {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "frames": []},
    {"action": "alloc", "addr": 8192, "size": 1024, "stream": 0, "frames": []},
    {"action": "free_requested", "addr": 8192, "size": 1024, "stream": 0, "frames": []},
    {"action": "alloc", "addr": 16384, "size": 256, "stream": 0, "frames": []},
    {"action": "free_completed", "addr": 8192, "size": 1024, "stream": 0, "frames": []},
    {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
    {"action": "segment_free", "addr": 4096, "size": 2097152, "stream": 0, "frames": []},
]
SNAPSHOT = {"segments": [], "device_traces": [[], TRACE], "allocator_settings": {}}


def test_events_are_read_with_their_signs():
    events = events_of(SNAPSHOT, index=1)
    assert events is not None
    assert events[1] == AllocatorEvent(address=4096, delta_bytes=512, is_segment=False)
    assert [event.delta_bytes for event in events if not event.is_segment] == [512, 1024, 256, -1024]


@pytest.mark.parametrize(
    ("snapshot", "index"), [({}, 0), ({"device_traces": "gone"}, 0), (SNAPSHOT, 2)], ids=["none", "other", "no device"]
)
def test_a_form_that_is_not_known_has_no_events(snapshot: dict, index: int):
    assert events_of(snapshot, index) is None


def test_a_device_without_a_record_has_none():
    assert events_of(SNAPSHOT, index=0) == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without CUDA")
def test_without_cuda_the_block_runs_and_there_is_no_record():
    with recorded() as record:
        torch.ones(2)
    assert record.events is None


@pytest.mark.gpu
def test_the_allocator_records_what_it_gives_out():
    with recorded() as record:
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert record.events is not None
    assert kept.nbytes in [event.delta_bytes for event in record.events]
