"""A pass must equal others bit for bit if they agree, and otherwise be as near to them as they are to each other."""

from __future__ import annotations

import pytest
import torch

from plimsoll.step.cuda_graphs.repeats import Seen, are_alike, is_again

LOSS, EXACT, NOISY = torch.tensor(2.5), torch.linspace(-1, 1, 9000), torch.linspace(-3, 3, 20_000)


def noise(seed, size=1e-4):
    return size * torch.randn(NOISY.shape, generator=torch.Generator().manual_seed(seed))


def seen(noisy=NOISY, exact=EXACT, loss=LOSS, state=0):
    return Seen.of([loss, exact, noisy], {"device": torch.tensor([state])})


def test_passes_with_the_same_bits_must_have_them_again():
    passes = [seen(), seen()]
    assert passes[0].has_bits_of(passes[1])
    assert are_alike(passes)
    assert is_again(passes, seen())
    for other in (seen(NOISY + noise(1)), seen(loss=LOSS * (1 + 1e-7)), seen(state=1)):
        assert not passes[0].has_bits_of(other)
        assert not is_again(passes, other)


def test_what_differs_between_them_must_be_as_near():
    """Tensors that did not differ must still be equal bit for bit."""
    passes = [seen(NOISY + noise(number)) for number in range(4)]
    assert are_alike(passes)
    for number in range(4, 40):
        assert is_again(passes, seen(NOISY + noise(number)))
    assert not is_again(passes, seen(NOISY + noise(5, size=2e-3)))
    assert not is_again(passes, seen(NOISY + noise(5), exact=EXACT + 1e-6))
    assert not is_again(passes, seen(NOISY + noise(5), loss=LOSS + 1e-6))
    shifted = NOISY + noise(5)
    shifted[: len(shifted) // 4] *= 1.01
    assert not is_again(passes, seen(shifted))
    assert not is_again(passes, seen(NOISY * float("nan")))


def test_differences_that_are_rare_are_told_by_those_of_other_tensors():
    """Few rows of an embedding table differ: a sample may miss them in two passes and hit one in the third."""

    def rare(number, at):
        table = EXACT.clone()
        table[at] += 1e-4
        return seen(NOISY + noise(number), exact=table)

    assert is_again([rare(0, 1), rare(1, 3)], rare(2, 4))


def test_passes_that_differ_by_more_than_rounding_are_not_alike():
    assert not are_alike([seen(), seen(NOISY * 1.1)])
    assert not are_alike([seen(), seen(state=1)])
    assert not are_alike([seen(), seen(NOISY[:-1])])


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.ones(3, 4).t(), torch.tensor([1 + 2j]), torch.arange(5)])
def test_any_dense_tensor_can_be_seen(tensor):
    assert is_again([Seen.of([tensor], {})] * 2, Seen.of([tensor.clone()], {}))
