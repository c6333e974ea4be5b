"""A fingerprint separates equal bits from rounding differences and from other results, without a copy."""

import pytest
import torch

from plimsoll.step.cuda_graphs.fingerprints import PassPrint, print_of


def numbers(dtype=torch.float32):
    return torch.linspace(-1, 3, 1000, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_near_and_anything_else_is_not(dtype):
    one, step = print_of(numbers(dtype)), torch.finfo(dtype).eps
    assert one == print_of(numbers(dtype))
    rounded = print_of(numbers(dtype) * (1 + 2 * step))
    assert rounded != one
    assert rounded.is_near(one)
    assert not print_of(numbers(dtype) * 1.1).is_near(one)


def test_what_is_no_plain_tensor_of_floats_has_a_print_too():
    assert print_of(torch.arange(5)) != print_of(torch.arange(1, 6))
    assert print_of(torch.zeros(0)) == print_of(torch.zeros(0, 3))
    assert print_of(torch.tensor([1 + 2j])) == print_of(torch.tensor([1 + 2j]))
    assert print_of(torch.eye(3).to_sparse()) == print_of(torch.eye(3).to_sparse())
    nan = torch.tensor([float("nan")])
    assert print_of(nan) == print_of(nan.clone())


def test_a_gradient_that_is_nothing_but_rounding_is_near():
    """Such is the gradient of a bias before BatchNorm, next to gradients of normal size."""

    def passed(tiny):
        gradients = [print_of(torch.full((4,), tiny)), print_of(torch.ones(4))]
        return PassPrint(print_of(torch.ones(())), gradients, [], None)

    assert passed(1e-9).is_near(passed(-3e-9))
    assert not passed(1e-9).is_near(passed(0.1))
    assert not passed(1e-9).is_near(passed(1e-9)._replace(gradients=[]))
