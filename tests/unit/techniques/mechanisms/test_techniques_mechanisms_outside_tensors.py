"""A tensor from outside a segment is refused, unless the segment may use it."""

import pytest
import torch
from torch import nn
from torch.autograd import Function

from plimsoll.errors import InputError
from plimsoll.memory.autograd_graph import MOST_NODES
from plimsoll.techniques.mechanisms.outside_tensors import next_operation, refuse_what_is_outside


class Doubled(Function):
    """A Python operation with an attribute that leaf nodes have."""

    @staticmethod
    def forward(ctx, given):
        ctx.variable = "of mine"
        return 2 * given

    @staticmethod
    def backward(ctx, arriving):
        return 2 * arriving


def test_what_was_computed_before_is_refused_by_its_operation():
    weight = torch.ones(2, requires_grad=True)
    context = weight.exp()
    begin = next_operation()
    result = (weight * context).sum()
    with pytest.raises(InputError, match=r"that `Exp` computed before .* give it to `unroll` as one of"):
        refuse_what_is_outside([result], [weight], begin)


def test_what_is_computed_later_by_another_is_refused_too():
    """Sequence numbers of another thread may be larger."""
    weight = torch.ones(2, requires_grad=True)
    begin = next_operation() + 1000
    with pytest.raises(InputError, match=r"that `Mul` computed"):
        refuse_what_is_outside([weight * 2], [weight], begin)


def test_a_leaf_that_was_not_given_is_refused():
    weight, other = torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(3, 1))
    begin = next_operation()
    with pytest.raises(InputError, match=r"a tensor of shape \[3, 1\] that needs a gradient but is not a parameter"):
        refuse_what_is_outside([weight * 2, other * weight], [weight], begin)


def test_what_is_given_may_have_a_graph():
    """The weight of a layer may be computed from others (weight normalization); it is passed as it is."""
    weight = torch.ones(2, requires_grad=True).exp()
    frozen = torch.ones(2)
    begin = next_operation()
    results = [Doubled.apply(weight * frozen).sum(), frozen.sum(), weight]
    refuse_what_is_outside(results, [weight, frozen], begin)


def test_no_walk_goes_far():
    weight, context = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    begin = next_operation()
    result = context
    for _ in range(2 * MOST_NODES):
        result = result + weight
    refuse_what_is_outside([result], [weight], begin)  # the leaf lies farther
