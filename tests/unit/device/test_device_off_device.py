"""Memory outside the device is counted separately, in a trace and in a recording of a real run."""

import threading

import torch

from plimsoll.device.off_device import (
    is_marked,
    is_outside,
    keeps_states_outside,
    mark_outside,
    outside_the_device,
    states_outside,
    unmark,
)
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.trace import dry_run


def make():
    """Return tensors of 4000 bytes on the device and of 8000 bytes outside, and a view of the latter."""
    inside = torch.empty(1000, device="cpu")
    with outside_the_device():
        outside = torch.empty(2000, device="cpu")
        inner = outside[:10]
    return inside, outside, inner


def bytes_in(trace):
    sizes = {False: 0, True: 0}
    for num_bytes, on_host in zip(trace.storages.num_bytes, trace.storages.on_host, strict=True):
        sizes[on_host] += num_bytes
    return sizes


def test_a_real_recording_counts_what_is_outside_apart():
    recorder = Recorder(phase=lambda: "forward")
    with recorder:
        kept = make()
    trace = recorder.trace("measured", "cpu")
    assert bytes_in(trace) == {False: 4000, True: 8000}
    assert live_bytes(trace).peak_bytes == 4000
    del kept


def test_a_dry_run_counts_what_is_outside_apart():
    for lowering in (CpuLowering(), CudaLowering((8, 6))):
        with dry_run(lowering, lambda: "forward") as stage:
            kept = make()
        assert bytes_in(stage.trace()) == {False: 4000, True: 8000}
        del kept


def test_blocks_can_be_in_each_other_and_are_of_one_thread():
    seen = []
    with outside_the_device():
        with outside_the_device():
            pass
        assert is_outside()
        thread = threading.Thread(target=lambda: seen.append(is_outside()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not is_outside()


def test_an_optimizer_keeps_its_states_outside_as_long_as_it_is_said():
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1) for _ in range(2))
    with states_outside(first, torch.clone):
        assert keeps_states_outside(first)
        assert not keeps_states_outside(second)
    assert not keeps_states_outside(first)


def test_a_mark_says_that_a_tensor_lies_outside_until_it_is_taken_back():
    tensor = torch.zeros(2)
    assert not is_marked(tensor)
    assert mark_outside(tensor) is tensor
    assert is_marked(tensor)
    unmark(tensor)
    unmark(tensor)
    assert not is_marked(tensor)
