"""Copies beside the computation arrive whole; on the CPU they are done when the call returns."""

import pytest
import torch

from plimsoll.techniques._side_stream import SideStream, wait_for


def test_on_the_cpu_the_copy_is_done_at_once():
    target = torch.zeros(3)
    assert SideStream(torch.device("cpu")).copy(target, torch.ones(3)) is None
    assert target.tolist() == [1, 1, 1]
    wait_for(None)


@pytest.mark.gpu
def test_on_cuda_what_is_asked_for_afterwards_sees_the_copy():
    device = torch.device("cuda")
    source, target = torch.arange(1 << 24, dtype=torch.float32).pin_memory(), torch.zeros(1 << 24, device=device)
    side = SideStream(device)
    event = side.copy(target, source)
    assert event is not None
    wait_for(event)
    assert torch.equal(target.cpu(), source)
