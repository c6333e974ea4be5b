"""Conversion of 4-bit weights between the packing of the CPU kernel and the form in files."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.weights import int4
from plimsoll.weights.int4 import packed_int4, packed_of, plain_of
from plimsoll.weights.parts import stored_bytes


class SizesMade(TorchDispatchMode):
    """A mode that records the bytes of every tensor that is created."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.sizes.append(result.nbytes)
        return result


@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_bit_is_lost_between_the_two_forms(group):
    torch.manual_seed(0)
    weight = torch.randn(32, 384)
    weight[3] = 0.25  # all values of a group are equal, so its scale is minimal
    packed = packed_int4(weight, group)
    again = packed_of(plain_of(packed))
    assert torch.equal(again.qdata, packed.qdata)
    assert torch.equal(again.scale_and_zero, packed.scale_and_zero)


@pytest.mark.parametrize("rows", [16, 64, 80, 208])
def test_what_is_packed_in_blocks_of_rows_is_what_is_packed_at_once(rows, monkeypatch):
    torch.manual_seed(1)
    packed = packed_int4(torch.randn(rows, 64), 32)
    monkeypatch.setattr(int4, "_BLOCK_NUMBERS", 64 * 64)
    assert torch.equal(packed_of(plain_of(packed)).qdata, packed.qdata)


@pytest.mark.long
def test_packing_takes_little_more_than_what_is_packed():
    plain = plain_of(packed_int4(torch.randn(2048, 1024), 32))
    with SizesMade() as made:
        packed_of(plain)
    assert max(made.sizes) <= 2 * plain.qdata.nbytes, "all of it in four bytes a number would be 8 times"


def test_the_form_of_files_is_an_integer_times_a_scale_and_a_zero_point():
    weight = torch.linspace(-1, 0.5, 16).repeat(16, 2)  # a step of 0.1: sixteen numbers, each of them exact
    plain = plain_of(packed_int4(weight, 32))
    low = (plain.qdata.view(torch.uint8) & 0xF).to(torch.int32)
    assert low[0, :8].tolist() == [8, 10, 12, 14, 0, 2, 4, 6], "-8, -6, ... as the lower halves of bytes"
    assert torch.allclose(plain.scale, torch.tensor(0.1))
    assert torch.allclose(plain.zero_point, torch.tensor(-0.2)), "what the integer 0 stands for"


def test_sizes_are_known_without_values():
    weight = torch.randn(32, 64)
    sized = packed_int4(weight.to("meta"), 32)
    assert stored_bytes(sized) == stored_bytes(packed_int4(weight, 32)) == 32 * 32 + 2 * 32 * 2 * 4
    assert stored_bytes(packed_of(plain_of(sized))) == stored_bytes(sized)
