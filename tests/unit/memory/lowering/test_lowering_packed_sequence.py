"""Packed batches in a trace: the shapes of the real functions, with lengths that are known and that are not."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from plimsoll.memory.lowering.packed_sequence import PackedSequences, known, values

LENGTHS = torch.tensor([5, 2, 2, 1])


class Replaced(TorchFunctionMode):
    def __init__(self, notes):
        super().__init__()
        self.replacements = PackedSequences(lambda *note: notes.append(note)).replacements

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.replacements.get(func, func)(*args, **(kwargs or {}))


def there_and_back(first, lengths, **options):
    inputs = torch.randn(*((4, 5) if first else (5, 4)), 3, requires_grad=True)
    packed = pack_padded_sequence(inputs, lengths, batch_first=first, **options)
    padded, _ = pad_packed_sequence(packed, batch_first=first, total_length=7)
    padded.sum().backward()
    return packed.data.shape, packed.batch_sizes.shape, padded.shape, inputs.grad.shape


@pytest.mark.parametrize("first", [False, True])
def test_real_lengths_are_obeyed(first):
    real, notes = there_and_back(first, LENGTHS), []
    with FakeTensorMode(allow_non_fake_inputs=True), Replaced(notes):
        assert there_and_back(first, LENGTHS) == real
    assert real[0] == (10, 3)
    assert not notes


def test_batch_sizes_are_those_of_the_real_function():
    inputs = torch.randn(5, 4, 3)
    real = pack_padded_sequence(inputs, LENGTHS)
    with FakeTensorMode(allow_non_fake_inputs=True), Replaced([]):
        packed = pack_padded_sequence(torch.randn(5, 4, 3), LENGTHS)
        assert values(packed.batch_sizes) == real.batch_sizes.tolist() == [4, 3, 1, 1, 1]
        assert values(pad_packed_sequence(packed)[1]) == [5, 2, 2, 1]
    assert torch.equal(PackedSequences(lambda *_: None).pack(inputs, LENGTHS, False)[0], real.data)


def test_fake_lengths_are_all_the_longest_and_it_says_so():
    notes = []
    with FakeTensorMode(allow_non_fake_inputs=True), Replaced(notes):
        lengths = torch.ones(4, 5).sum(1).long()
        shapes = there_and_back(True, lengths, enforce_sorted=False)
    assert shapes == ((20, 3), (5,), (4, 7, 3), (4, 5, 3))
    assert notes == [("4 samples are taken to be as long as the longest, 5 steps", 0, 0)]


def test_the_first_of_known_values_can_be_read():
    with FakeTensorMode():
        tensor = known([3, 1], torch.randn(2))
        assert torch.zeros(2, tensor[0]).shape == (2, 3)
        assert values(torch.ones(2).long()) is None
    assert torch.equal(known([3, 1], torch.randn(2)), torch.tensor([3, 1]))
