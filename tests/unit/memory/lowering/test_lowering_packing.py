"""Packed sequences of fake tensors have the shapes, counts and bytes of real ones."""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from plimsoll.errors import InputError
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.packing import pack_padded_sequence as pack
from plimsoll.memory.trace import dry_run

LENGTHS = [[5, 3, 2], [2, 5, 3], [4, 4, 4], [5, 1, 1], [1]]


def packed_and_padded(data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[PackedSequence, Tensor, Tensor]:
    packed = pack_padded_sequence(data, lengths, batch_first=batch_first, enforce_sorted=False)
    return packed, *pad_packed_sequence(packed, batch_first=batch_first)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_shapes_and_counts_are_those_of_the_real_ones(lengths: list[int], batch_first: bool):
    shape = (len(lengths), 5, 2) if batch_first else (5, len(lengths), 2)
    data, known = torch.ones(shape, requires_grad=True), torch.tensor(lengths)
    real, real_padded, real_lengths = packed_and_padded(data, known, batch_first)
    real_padded.sum().backward()
    with dry_run(CpuLowering()) as place:
        fake_data = place.fake_batch(data.detach()).requires_grad_()
        fake, padded, padded_lengths = packed_and_padded(fake_data, place.fake_batch(known), batch_first)
        padded.sum().backward()
        assert fake_data.grad is not None
        assert fake_data.grad.shape == data.shape
        assert fake.data.shape == real.data.shape
        assert fake.data.untyped_storage().nbytes() == real.data.untyped_storage().nbytes()
        assert (padded.shape, padded.stride()) == (real_padded.shape, real_padded.stride())
        assert fake.batch_sizes.tolist() == real.batch_sizes.tolist()
        assert padded_lengths.tolist() == real_lengths.tolist() == lengths


def test_a_total_length_pads_further():
    with dry_run(CpuLowering()) as place:
        packed = pack_padded_sequence(torch.empty(3, 2, 4), place.fake_batch(torch.tensor([3, 1])))
        padded, _ = pad_packed_sequence(packed, total_length=7)
    assert padded.shape == (7, 2, 4)


def test_the_counts_stay_until_backward():
    """Real packing saves 3 counts of 8 bytes for its backward pass."""
    with dry_run(CpuLowering()) as place:
        data = torch.empty(3, 2, 4, requires_grad=True)
        packed, counts = pack(data, place.fake_batch(torch.tensor([3, 1])), False)
        loss = packed.sum()
        del packed, counts
        torch.empty(9)
        loss.backward()
        torch.empty(9)
    trace = place.trace()
    row = trace.storages.shape.index(trace.texts.index("int64[3]"))
    assert trace.storages.num_bytes[row] == 24
    assert trace.texts[trace.ops.name[trace.storages.died[row]]] == "aten.new_zeros.default"


def test_lengths_must_be_known():
    with dry_run(CpuLowering()), pytest.raises(InputError, match="not known before the run"):
        pack_padded_sequence(torch.empty(3, 2, 4), torch.empty(2, dtype=torch.int64), enforce_sorted=True)


# Cases that torch refuses: the shape of the batch (steps first), the lengths, and whether they are sorted.
REFUSED = [
    pytest.param(
        (5, 3, 2), [5, 0, 2], False, "greater than 0", r"sample 2 \(counted from 0, longest first\)", id="zero"
    ),
    pytest.param((5, 3, 2), [5, 3, 0], True, "greater than 0", "its length is 0: leave out samples", id="last zero"),
    pytest.param((5, 3, 2), [5, -1, -1], True, "greater than 0", "sample 1 .* its length is -1", id="negative"),
    pytest.param((5, 3, 2), [0, 0, 0], False, "greater than 0", "sample 0 .* its length is 0", id="all zero"),
    pytest.param(
        (5, 3, 2), [2, 5, 3], True, "sorted in decreasing", "sample 1 .* with 5 .* with 2 because .*False", id="order"
    ),
    pytest.param((5, 3, 2), [5, 3], True, "equal to batch_size", r"3 samples with 2 lengths \[5, 3\]", id="too few"),
    pytest.param((5, 0, 2), [], True, "empty tensors", r"shape \[5, 0, 2\] .*: leave out", id="no samples"),
    pytest.param((5, 3, 0), [5, 3, 2], True, "empty tensors", "it has no values", id="no values"),
]


@pytest.mark.parametrize(("shape", "lengths", "is_sorted", "of_torch", "of_plimsoll"), REFUSED)
def test_what_torch_refuses_is_refused_with_the_sample_and_a_remedy(
    shape: tuple[int, ...], lengths: list[int], is_sorted: bool, of_torch: str, of_plimsoll: str
):
    known = torch.tensor(lengths, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=of_torch):
        pack_padded_sequence(torch.ones(shape), known, enforce_sorted=is_sorted)
    with dry_run(CpuLowering()) as place, pytest.raises(InputError, match=of_plimsoll):
        pack_padded_sequence(place.fake_batch(torch.ones(shape)), place.fake_batch(known), enforce_sorted=is_sorted)


def test_lengths_beyond_the_last_step_are_refused_though_torch_packs_them_for_a_net_that_then_fails():
    """10 tokens are packed, but 3 + 3 + 2 + 1 + 1 + 1 = 11 are counted."""
    packed = pack_padded_sequence(torch.ones(5, 3, 2), torch.tensor([6, 3, 2]))
    assert (len(packed.data), int(packed.batch_sizes.sum())) == (10, 11)
    with pytest.raises(RuntimeError, match=r"start \(10\) \+ length \(1\) exceeds"):
        torch.nn.GRU(2, 2)(packed)
    with dry_run(CpuLowering()) as place, pytest.raises(InputError, match="of 6 steps, .* in a batch of 5 steps"):
        pack_padded_sequence(place.fake_batch(torch.ones(5, 3, 2)), place.fake_batch(torch.tensor([6, 3, 2])))


def test_many_lengths_are_not_all_shown():
    with dry_run(CpuLowering()) as place, pytest.raises(InputError, match=r"\[1, 1, 1, 1, 1, 1, 1, 1\] \.\.\.: give"):
        pack(torch.empty(3, 2, 4), place.fake_batch(torch.ones(50, dtype=torch.int64)), False)
