"""Products in groups on fake tensors have the shape, the strides and the bytes of real ones, in every type."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.memory.grouped import GROUPED, grouped_flops, grouped_result
from plimsoll.memory.known import KnownValues

OFFSETS = torch.tensor([2, 5, 5, 12], dtype=torch.int32)
SHAPES = {  # of groups along rows, what is summed over, none, and columns
    "rows": ((12, 8), (4, 8, 9), (12, 9)),
    "sums": ((16, 12), (12, 24), (4, 16, 24)),
    "none": ((4, 16, 8), (4, 8, 9), (4, 16, 9)),
    "columns": ((4, 16, 8), (8, 12), (16, 12)),
}


def column_major(shape, dtype):
    return torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-2, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_result_lies_as_a_real_one(name, dtype):
    a_shape, b_shape, expected = SHAPES[name]
    a, b = torch.zeros(a_shape, dtype=dtype), torch.zeros(b_shape, dtype=dtype)
    a = column_major(a_shape, dtype) if name == "sums" else a
    b = b if name == "sums" else column_major(b_shape, dtype)
    offsets = None if name == "none" else OFFSETS
    real = torch._grouped_mm(a, b, offs=offsets)
    made = grouped_result(a, b, offsets)
    assert tuple(made.shape) == expected
    assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)
    assert made.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def test_float32_has_a_version_for_fake_tensors():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        known = KnownValues(mode, lambda: None)
        a, b, offsets = map(known.fake, (torch.zeros(12, 8), column_major((4, 8, 12), torch.float32), OFFSETS))
        made = known.run(GROUPED, (a, b, offsets), {})
    assert (type(made), tuple(made.shape)) == (type(a), (12, 12))


def test_operations_are_of_the_rows_and_not_of_all_groups():
    # 12 rows of 8 numbers, each with one of four matrices of 8 times 9.
    assert grouped_flops(torch.zeros(12, 8), torch.zeros(4, 8, 9)) == 2 * 12 * 8 * 9
    assert grouped_flops(torch.zeros(16, 12), torch.zeros(12, 24)) == 2 * 16 * 12 * 24
    assert grouped_flops(torch.zeros(4, 16, 8), torch.zeros(4, 8, 9)) == 2 * 4 * 16 * 8 * 9
    assert grouped_flops(torch.zeros(4, 16, 8), torch.zeros(8, 12)) == 2 * 16 * 8 * 12
