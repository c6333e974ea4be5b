"""The seed of a captured backward pass, and gradients that accumulate onto -0.0 unchanged."""

import pytest
import torch
from torch import nn

from plimsoll.step.cuda_graphs.capture import _part_of, _seed_of


@pytest.mark.parametrize("share", [1, 3 / 8, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_seed_gives_the_gradients_of_a_part_of_the_loss(share, dtype, is_scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9) if is_scaled else None
    torch.manual_seed(0)
    weight, x = torch.randn(5, requires_grad=True), torch.randn(5)

    def loss():
        return (weight * x).square().mean().to(dtype)

    part = loss() * share if share != 1 else loss()
    (part if scaler is None else scaler.scale(part)).backward()
    expected, weight.grad = weight.grad, torch.full_like(weight, -0.0)
    mean = loss()
    torch.autograd.backward(mean, _seed_of(mean, share, scaler))
    assert torch.equal(weight.grad, expected)
    assert torch.equal(_part_of(mean, share), part.detach().to(torch.promote_types(dtype, torch.float32)))


def test_minus_zero_leaves_what_is_added_to_it_as_it_is():
    added = torch.tensor([0.0, -0.0, 1.0, -2.0, float("inf")])
    bits = torch.full_like(added, -0.0).add_(added).view(torch.int32)
    assert torch.equal(bits, added.view(torch.int32))
    assert not torch.equal(torch.zeros_like(added).add_(added).view(torch.int32), added.view(torch.int32))


def test_the_loss_may_be_a_tensor_of_one_element():
    loss = nn.Linear(3, 1)(torch.ones(1, 3)).view(1)
    assert _seed_of(loss, 0.5, None).tolist() == [0.5]
