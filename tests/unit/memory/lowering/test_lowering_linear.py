"""A linear layer's bias on fake tensors: as on real ones."""

import torch
from torch import nn

from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import trace_training


def outputs_of(is_contiguous, has_bias=True):
    """How many tensors of the output's size a linear layer's forward makes."""

    def step(place):
        layer = nn.Linear(4, 5, bias=has_bias).to("cuda")
        given = torch.zeros(2, 3, 4, device="cuda")
        out = layer(given if is_contiguous else given.transpose(0, 1))
        out.sum().backward()
        assert layer.weight.grad is not None

    trace = trace_training(step, CudaLowering((9, 0)))
    ops, storages = trace.ops, trace.storages
    return sum(
        num_bytes == 2 * 3 * 5 * 4 and ops.phase[born] == "forward"
        for num_bytes, born in zip(storages.num_bytes, storages.born, strict=True)
    )


def test_the_bias_is_added_in_place():
    assert [outputs_of(True), outputs_of(False), outputs_of(False, has_bias=False)] == [1, 1, 1]


def test_real_results_and_gradients_are_those_of_torch():
    from plimsoll.memory.lowering.linear import LINEAR

    for given in (torch.randn(3, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4).transpose(0, 1), torch.randn(4)):
        weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
        results = [linear(given, weight, bias) for linear in (LINEAR["linear"], nn.functional.linear)]
        torch.testing.assert_close(*results)
        ours, theirs = (torch.autograd.grad(result.sum(), (weight, bias)) for result in results)
        torch.testing.assert_close(ours, theirs)
