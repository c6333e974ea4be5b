"""Facts that a driver's answer contains or lacks, and a machine without a driver."""

import pynvml
import pytest

from plimsoll.device.cuda import nvml


@pytest.mark.parametrize(
    ("listed", "own_bytes", "others_bytes", "reason"),
    [
        ({7: 100, 8: 30, 9: 5}, 100, 35, None),
        ({7: 100}, 100, 0, None),
        ({7: None, 8: None}, None, None, "WSL"),
        ({8: 30}, None, None, "container"),
        ({}, None, None, "container"),
    ],
)
def test_own_and_other_use_are_told_apart_where_the_driver_tells_both(listed, own_bytes, others_bytes, reason):
    view = nvml.split_use(listed, own=7)
    assert (view.own_bytes, view.others_bytes) == (own_bytes, others_bytes)
    assert reason is None if view.note is None else reason in view.note


def _has_driver():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(_has_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_the_reason_is_given_instead():
    view = nvml.driver_view("GPU-0")
    assert (view.own_bytes, view.others_bytes) == (None, None)
    assert view.note.startswith("NVML does not describe GPU-0 (NVML Shared Library Not Found)")
    assert nvml.driver_version() is None


def _entry(pid, used_bytes):
    """Return an entry as pynvml does: its own structure, with the size ``None`` if the driver reports no size."""
    entry = pynvml.c_nvmlProcessInfo_v2_t(pid, used_bytes)
    return pynvml.nvmlStructToFriendlyObject(entry)


def test_processes_are_mapped_to_their_bytes_and_a_slice_without_one_makes_it_unknown():
    entries = [_entry(7, 100), _entry(8, 30), _entry(8, 12)]
    assert nvml.by_process(entries) == {7: 100, 8: 42}
    silent = _entry(8, 1)
    silent.usedGpuMemory = None
    assert nvml.by_process([*entries, silent]) == {7: 100, 8: None}
    assert nvml.by_process([silent, _entry(8, 5)]) == {8: None}


@pytest.mark.skipif(_has_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_there_are_no_gpus():
    with nvml.gpu_uses() as look:
        assert look() == ()


@pytest.mark.skipif(not _has_driver(), reason="this machine has no NVIDIA driver")
def test_every_gpu_says_its_memory():
    with nvml.gpu_uses() as look:
        found = look()
    assert found
    assert all(0 <= gpu.used_bytes <= gpu.total_bytes and gpu.name for gpu in found)
