"""Writes of a block to existing tensors are detected, whoever holds them, and the old contents are copied."""

import pytest
import torch
from torch import nn

from plimsoll.step.undo.written import Writes, key_of


def before_and_in(write):
    """Run ``write`` on an existing tensor. Return the copied contents (``None`` without a write) and the tensor."""
    tensor = torch.arange(6.0).reshape(2, 3)
    with Writes() as writes:
        write(tensor)
    kept = writes.written.get(key_of(tensor))
    return None if kept is None else kept[1].view(torch.float32).tolist(), tensor


WAYS = {
    "in place": lambda tensor: tensor.add_(1),
    "through a view": lambda tensor: tensor[:, 1].zero_(),
    "by an index": lambda tensor: tensor.__setitem__((0, 1), 7.0),
    "through .data": lambda tensor: tensor.data.mul_(2),
    "through detach": lambda tensor: tensor.detach().fill_(3),
    "as one of a list": lambda tensor: torch._foreach_add_([tensor], 1.0),
    "as what a function writes to": lambda tensor: torch.add(torch.ones(2, 3), 1, out=tensor),
    "through an expanded view": lambda tensor: tensor[:1].copy_(torch.ones(1, 3)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_write_is_seen_and_what_was_there_is_kept(way):
    kept, tensor = before_and_in(WAYS[way])
    assert kept == [0, 1, 2, 3, 4, 5]
    assert tensor.flatten().tolist() != kept


@pytest.mark.parametrize("read", [lambda tensor: tensor + 1, lambda tensor: tensor.clone().zero_(), torch.sum])
def test_what_is_only_read_is_not_copied(read):
    assert before_and_in(read)[0] is None


def test_what_is_made_in_the_block_is_no_state():
    with Writes() as writes:
        torch.zeros(3).add_(1)
        torch.tensor([1.0, 2.0]).mul_(2)
        torch.ones(4).view(2, 2)[0].add_(1)
    assert not writes.written


def test_only_what_was_there_before_the_first_write_is_kept():
    tensor = torch.zeros(2)
    with Writes() as writes:
        tensor.add_(1)
        tensor.add_(1)
    assert writes.written[key_of(tensor)][1].view(torch.float32).tolist() == [0, 0]


def test_the_statistics_of_batch_norm_are_seen_whose_kernel_does_not_say_that_it_writes():
    norm = nn.BatchNorm1d(3)
    with Writes() as writes:
        norm(torch.randn(4, 3))
    written = {key_of(tensor) for tensor in norm.buffers()}
    assert written <= writes.written.keys()


def test_a_write_in_backward_and_in_a_hook_of_a_gradient_is_seen():
    weight, count = nn.Parameter(torch.ones(2)), torch.zeros(1)

    def counted(_):
        count.add_(1)

    weight.register_post_accumulate_grad_hook(counted)
    with Writes() as writes:
        (weight * 2).sum().backward()
    assert writes.written.keys() == {key_of(count)}
