"""Four bits between the form that a processor wants and the form of files."""

import pytest
import torch

from plimsoll.weights.int4 import packed_int4, packed_of, plain_of
from plimsoll.weights.parts import stored_bytes


@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_bit_is_lost_between_the_two_forms(group):
    torch.manual_seed(0)
    weight = torch.randn(32, 384)
    weight[3] = 0.25  # all of a group the same: its scale is the least there is
    packed = packed_int4(weight, group)
    again = packed_of(plain_of(packed))
    assert torch.equal(again.qdata, packed.qdata)
    assert torch.equal(again.scale_and_zero, packed.scale_and_zero)


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
