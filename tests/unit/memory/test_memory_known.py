"""Values that a trace knows: which are forgotten, and that the others are not."""

import torch

from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import rehearsal


def test_a_value_that_was_overwritten_is_unknown_and_one_made_later_in_its_place_is_known():
    with rehearsal(CudaLowering((9, 0))) as place:
        for _ in range(50):  # some of the later tensors get the memory of an earlier one
            overwritten = torch.zeros(1, dtype=torch.int64)
            overwritten.add_(torch.empty(1, dtype=torch.int64))
            del overwritten
            known = torch.arange(1) + 7
            assert known.item() == 7
        assert not place.known.assumptions
        overwritten = torch.ones(1, dtype=torch.int64)
        overwritten.add_(torch.empty(1, dtype=torch.int64))
        assert overwritten.item() == 0
    assert [one.text[:40] for one in place.known.assumptions] == ["the value of a int64 tensor was taken fo"]
