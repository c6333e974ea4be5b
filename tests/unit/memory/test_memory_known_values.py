"""Values of fake tensors: which are known, forgotten, or assumed with a note."""

import pytest
import torch
from torch import Tensor

from plimsoll.errors import InputError
from plimsoll.memory.known_values import values_of
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import DryRun, dry_run, trace_training


def test_lengths_are_computed_from_a_mask():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    with dry_run(CpuLowering()) as place:
        fake = place.fake_batch(mask)
        assert values_of(fake.sum(1)) == [3, 1]
        assert not bool((fake == 1).all())
        assert int(fake.sum(1).max()) == 3
    assert place.trace().assumptions == ()


def test_positions_are_known_without_a_batch():
    with dry_run(CpuLowering()):
        positions = torch.arange(4)
        assert values_of(positions[1:] * 2) == [2, 4, 6]
        assert values_of(positions.view(2, 2)[1]) == [2, 3]


class Doubling(Tensor):
    """A tensor class whose dispatch doubles every sum."""

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            result = op(*args, **(kwargs or {}))
            return result * 2 if op is torch.ops.aten.add.Tensor else result.as_subclass(cls)


def test_values_of_a_class_of_its_own_are_computed_its_way():
    plain = torch.tensor([1, 2])
    own = plain.as_subclass(Doubling)
    with dry_run(CpuLowering()) as place:
        assert values_of(place.fake_batch(own) + 1) == [4, 6]
        assert values_of(place.fake_batch(plain) + 1) == [2, 3]


def test_a_view_sees_what_is_written_through_another():
    with dry_run(CpuLowering()):
        numbers = torch.zeros(4, dtype=torch.int64)
        numbers[1:3].add_(5)
        assert values_of(numbers) == [0, 5, 5, 0]


def test_an_overwrite_by_unknown_values_forgets_all_views():
    with dry_run(CpuLowering()) as place:
        numbers = torch.arange(4)
        half = numbers[:2]
        half.copy_(unknown(place, 2).long())
        for forgotten in (numbers, half):
            with pytest.raises(InputError, match="not known before the run: use lengths that follow"):
                values_of(forgotten + 0)


def test_a_real_tensor_keeps_its_values_when_a_fake_copy_is_forgotten():
    real = torch.tensor([1, 2])
    with dry_run(CpuLowering()) as place:
        values = place.fake_batch(real) + 0
        values.copy_(unknown(place, 2).long())
    assert real.tolist() == [1, 2]


def test_an_unknown_answer_is_zero_and_said():
    with dry_run(CpuLowering()) as place:
        loss = unknown(place, 3).sum()
        assert loss.item() == 0
        assert not bool(loss > 1)
    texts = [assumption.text for assumption in place.trace().assumptions]
    assert len(texts) == 2
    assert "the value of a float32 tensor was assumed to be 0" in texts[0]
    assert "test_memory_known_values.py" in texts[0]


def test_known_places_of_values_are_counted():
    with dry_run(CpuLowering()) as place:
        chosen = place.fake_batch(torch.tensor([0, 3, 0, 4])).nonzero()
        assert chosen.shape == (2, 1)
        assert values_of(chosen.squeeze(1)) == [1, 3]


def test_unknown_places_are_as_many_as_there_can_be_and_said():
    with dry_run(CpuLowering()) as place:
        chosen = (unknown(place, 3, 4) > 0).nonzero()
        assert chosen.shape == (12, 2)
        assert torch.masked_select(unknown(place, 5), unknown(place, 5) > 0).shape == (5,)
        assert [one.shape for one in torch.unique(unknown(place, 6), return_inverse=True)] == [(6,), (6,)]
    assumed = [assumption.text.split()[0] for assumption in place.trace().assumptions]
    assert assumed == ["aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default"]


def test_how_much_less_it_is_where_nothing_is_kept_is_found_by_tracing_again():
    def train(place):
        data = unknown(place, 100)
        kept = torch.masked_select(data, data > 0)
        return kept * 2, kept

    (assumption,) = trace_training(train, CpuLowering()).assumptions
    # 100 numbers three times (the data, the selection, its double), or the data, the mask of bytes and one number.
    assert assumption.low_bytes == (100 * 4 + 100 + 4) - 3 * 100 * 4


def test_floating_point_values_of_a_few_elements_are_known():
    with dry_run(CpuLowering()):
        share = torch.tensor(0.5) * torch.ones(2)
        assert share.sum().item() == 1.0


def unknown(place: DryRun, *shape: int) -> Tensor:
    """Return a tensor with unknown values."""
    return place.fake_batch(torch.empty(*shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_that_is_drawn_leaves_no_layer_out(dtype):
    with dry_run(CpuLowering()) as place:
        assert 0.99 < float(torch.rand([], dtype=dtype)) < 1
    assert place.trace().assumptions == ()


def test_what_is_drawn_by_known_numbers_is_not_known():
    with dry_run(CpuLowering()) as place:
        chances = place.fake_batch(torch.tensor([1, 1])).float()
        assert values_of(chances.long()) == [1, 1]
        for drawn in (torch.bernoulli(chances), chances.uniform_()):
            with pytest.raises(InputError, match="not known"):
                values_of(drawn.long())


def test_a_value_that_was_overwritten_is_unknown_and_one_made_later_in_its_place_is_known():
    with dry_run(CudaLowering((9, 0))) as place:
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
    assert [one.text[:40] for one in place.known.assumptions] == ["the value of a int64 tensor was assumed "]
