"""Host tensors for a training on CUDA. The CPU stands in for the GPU, so they are not pinned."""

import pytest
import torch

from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import dry_run
from plimsoll.techniques.mechanisms.pinned import PinnedPool


def test_a_copy_is_the_same_tensor_elsewhere():
    pool, tensor = PinnedPool(), torch.arange(12.0).view(3, 4).t()
    copy = pool.copy_of(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert pool.holds(copy)
    assert pool.holds(copy[1:])
    assert not pool.holds(tensor)


def test_in_a_trace_it_is_the_hosts_and_what_is_brought_back_is_the_devices():
    pool = PinnedPool()
    with dry_run(CudaLowering((8, 6)), lambda: "forward") as stage:
        on_device = torch.empty(1000, device="cuda")
        kept = pool.copy_of(on_device)
        del on_device
        brought = torch.empty(1000, device="cuda").copy_(kept)
    assert stage.trace().storages.on_host == (False, True, False)
    assert brought.shape == (1000,)


@pytest.mark.gpu
def test_on_cuda_it_is_pinned():
    assert PinnedPool().copy_of(torch.ones(3, device="cuda")).is_pinned()
