"""Results of ops: equal to the results of torch, computed once; grouped products as real ones, in every type."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from plimsoll.memory.known_values import KnownValues
from plimsoll.memory.layouts import GROUPED, Layouts, grouped_result
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import dry_run
from plimsoll.memory.work import grouped_flops
from plimsoll.models.workload import model_loss
from plimsoll.planning.dry_run.step import dry_run_step
from plimsoll.records.plan import micro_batch_choice
from plimsoll.techniques.time_segments import time_segments_choice
from workloads import CASES

MODES = [CpuLowering(), CudaLowering((8, 0))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lowering", MODES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("case", [one for one in CASES if not one.has_batch_norm], ids=lambda case: case.name)
def test_a_training_is_the_same_where_torch_is_asked_each_time(case, lowering, monkeypatch):
    """Traces show shapes, effects of strides, and the birth and death of each storage."""

    def traced(*choices):
        model, optimizer = case.fresh()
        shape = {"units": case.units, "choices": choices, "clip_norm": 1.0, "precision": "fp32"}
        return dry_run_step(model, optimizer, case.batches()[0], model_loss, lowering, **shape)

    combinations = [(micro_batch_choice(2),)]
    if case.name == "lstm":
        combinations.append((time_segments_choice(4), micro_batch_choice(2)))
    remembered = [traced(*combination) for combination in combinations]
    monkeypatch.setattr(Layouts, "run", lambda self, op, args, kwargs, tensors: op(*args, **kwargs))
    monkeypatch.setattr(Layouts, "like", lambda self, real: None)
    assert [traced(*combination) for combination in combinations] == remembered


def num_asked() -> int:
    """Return how often torch computed the result of an op."""
    info = FakeTensorMode.cache_info()
    return info.hits + info.misses + sum(info.bypasses.values())


def test_what_was_asked_once_is_not_asked_again():
    with dry_run(CpuLowering()):
        first, second, other = torch.empty(3, 2), torch.empty(3, 2), torch.empty(3, 5)
        assert first.mul_(second) is first
        product = first @ second.t()
        before = num_asked()
        assert second.mul_(first) is second
        again = second @ first.t()
        assert num_asked() == before
        assert (again.shape, again.stride(), again.dtype) == (product.shape, product.stride(), product.dtype)
        assert again.untyped_storage()._cdata != product.untyped_storage()._cdata
        assert (second.t() @ other).shape == (2, 5)
        assert num_asked() > before
        with pytest.raises(RuntimeError, match="roadcast"):
            first.mul_(torch.empty(5))


def test_what_is_made_without_tensors_is_asked_once_and_has_memory_of_its_own():
    makers = (torch.empty, torch.zeros, torch.ones, torch.rand)
    before = torch.get_default_dtype()
    with dry_run(CpuLowering()):
        made = [make(3, 2) for make in makers]
        num_before = num_asked()
        made += [make(3, 2) for make in makers]
        assert num_asked() == num_before
        assert len({one.untyped_storage()._cdata for one in made}) == len(made)
        assert {(one.shape, one.dtype, one.device.type) for one in made} == {((3, 2), torch.float32, "cpu")}
        assert torch.zeros(3, 2, dtype=torch.int64).dtype == torch.int64
        assert torch.zeros(3, 2, device="meta").device.type == "meta"
        try:
            torch.set_default_dtype(torch.float64)
            assert torch.zeros(3, 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(before)


def test_numbers_that_are_made_a_tensor_are_not_asked_of_torch_and_stay_known():
    with dry_run(CpuLowering()):
        num_before = num_asked()
        first, second = torch.tensor(3.0), torch.tensor([3, 4])
        assert first.add_(1) is first
        assert (first.item(), second.tolist(), first.detach().view(1).item()) == (4.0, [3, 4], 4.0)
        assert [one.untyped_storage().nbytes() for one in (first, second)] == [4, 16]
        with _disable_current_modes():
            part = torch.arange(4)[1:]
        assert num_asked() == num_before
        assert torch.ops.aten.lift_fresh(part).untyped_storage().nbytes() == 32  # the whole storage counts
        assert num_asked() > num_before


def test_an_optimizers_op_on_lists_is_asked_once_also_for_a_later_dry_run():
    aten = torch.ops.aten

    def update():
        lists = [[torch.empty(size, 3) for size in (2, 5, 7)] for _ in range(3)]
        before = num_asked()
        assert aten._foreach_addcdiv_.Scalar(lists[0], lists[1], lists[2]) is None
        roots = aten._foreach_sqrt(lists[0])
        assert [root.shape for root in roots] == [one.shape for one in lists[0]]
        return num_asked() - before

    counts = []
    for _ in range(2):
        with dry_run(CpuLowering()):
            counts.append(update())
    assert counts[0] > counts[1] == 0
    with dry_run(CpuLowering()), pytest.raises(RuntimeError):
        aten._foreach_addcdiv_.Scalar([torch.empty(2)], [torch.empty(3)], [torch.empty(2)])


def test_the_type_of_a_number_follows_the_default_of_its_time():
    before = torch.get_default_dtype()
    with dry_run(CpuLowering()):
        whole = torch.empty(3, dtype=torch.int32)
        try:
            types = []
            for default in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(default)
                types.append((whole * 0.5).dtype)
        finally:
            torch.set_default_dtype(before)
    assert types == [torch.float32, torch.float64, torch.float32]


def test_numbers_that_are_equal_and_of_other_types_are_told_apart():
    with dry_run(CpuLowering()):
        numbers = torch.empty(3, dtype=torch.int32)
        types = [(numbers * factor).dtype for factor in (1, 1.0, True, 1)]
        assert types == [torch.int32, torch.float32, torch.int32, torch.int32]


def test_what_shares_memory_shares_it_each_time():
    with dry_run(CpuLowering()):
        whole, aten = torch.empty(4, 6), torch.ops.aten
        for _ in range(2):
            views = aten.alias(whole), aten._reshape_alias(whole, [24], [1]), whole[1:, None]
            parts = *aten.unsafe_split(whole, 2, 1), *whole.split(2), *whole.unbind()
            for part in (*parts, *views):
                assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata


def test_a_tensor_that_changes_its_shape_or_memory_does_so_each_time():
    with dry_run(CpuLowering()):
        for _ in range(2):
            square = torch.empty_strided((3, 3), (3, 1))
            assert square.t_().stride() == (1, 3)
            assert square.resize_(2, 2).shape == (2, 2)
            other = torch.empty(2, 2)
            assert square.set_(other).untyped_storage()._cdata == other.untyped_storage()._cdata
            out = torch.empty(0)
            torch.mul(other, 2, out=out)
            assert out.shape == (2, 2)


def test_of_a_result_with_one_tensor_twice_there_is_one_each_time():
    gates, hidden = 8, 2
    with dry_run(CpuLowering()):
        layer = torch.nn.LSTM(hidden, hidden)
        for _ in range(2):
            layer(torch.empty(3, 1, hidden))[0].sum().backward()
            gradients = layer.bias_ih_l0.grad, layer.bias_hh_l0.grad
            assert [one.shape for one in gradients] == [(gates,), (gates,)]
            assert len({one.untyped_storage()._cdata for one in gradients}) == 2
            layer.zero_grad()


OFFSETS = torch.tensor([2, 5, 5, 12], dtype=torch.int32)
SHAPES = {  # of groups along rows, along the summed dimension, along no dimension, and along columns
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
