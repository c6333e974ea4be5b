"""Transfer of batches without overlap on the CPU; a test with a GPU checks the side stream."""

import pytest
import torch

from plimsoll.data.batches.transfer import Transfer


def test_on_the_cpu_a_batch_is_passed_on():
    transfer = Transfer("cpu")
    fields = {"input_ids": torch.arange(6).reshape(2, 3), "texts": ["a", "b"]}
    moving = transfer.begin(fields)
    assert not transfer.is_overlapped
    assert moving.arrival is None
    assert transfer.finish(moving)["input_ids"] is fields["input_ids"]
    assert transfer.finish(moving)["texts"] is fields["texts"]


def test_another_device_gets_the_tensors():
    moved = Transfer("meta").begin({"input_ids": torch.arange(6)}).fields
    assert moved["input_ids"].device.type == "meta"


@pytest.mark.gpu
def test_a_gpu_gets_what_the_host_had_while_it_computes():
    transfer = Transfer("cuda")
    assert transfer.is_overlapped
    batches = [{"input_ids": torch.full((1 << 20,), number), "texts": number} for number in range(20)]
    busy = torch.randn(4096, 4096, device="cuda")
    moving, sums = transfer.begin(batches[0]), []
    for number in range(20):
        following = transfer.begin(batches[number + 1]) if number < 19 else None
        fields = transfer.finish(moving)
        busy = (busy @ busy).tanh()
        sums.append((fields["input_ids"] + busy[0, 0].long() * 0).sum())
        assert fields["texts"] == number
        moving = following
    assert [int(one) for one in sums] == [number << 20 for number in range(20)]
