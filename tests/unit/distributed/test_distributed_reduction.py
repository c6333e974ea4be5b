"""The sum of the gradients of two ranks, with a stand-in for the exchange; tests/numerics has real exchanges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.distributed import reduction
from plimsoll.distributed.ranks import Ranks
from plimsoll.distributed.reduction import Reduction
from plimsoll.errors import InputError
from plimsoll.memory.recorder import Recorder


class WithTwin(Ranks):
    """One of two ranks.

    The other has the same gradients if ``peer_has`` is set. The sizes of exchanges are recorded.
    """

    def __init__(self, peer_has: list[bool]) -> None:
        super().__init__()
        self.world_size = 2
        self.peer_has = peer_has
        self.exchanged: list[int] = []

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.add_(torch.tensor([10.0, *map(float, self.peer_has)], dtype=torch.float64))

    def reduce(self, gradient: torch.Tensor) -> None:
        assert gradient.is_contiguous()
        self.exchanged.append(gradient.numel())
        gradient.mul_(2)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, parameter in enumerate(made, start=1):
        parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape) + number
    return made


def added(ranks: WithTwin, of: list[nn.Parameter]) -> list[torch.Tensor]:
    one = Reduction(ranks, of)
    one.prepare()
    one.add_up_loss(0.0)
    assert not one.has_gaps
    one.add_up()
    return [parameter.grad for parameter in of if parameter.grad is not None]


def test_small_gradients_go_together_and_large_ones_by_themselves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 40)  # 10 numbers
    of = parameters((4,), (2, 3), (20,), (5,), (0,))
    before = [parameter.grad.clone() for parameter in of]
    ranks = WithTwin([True] * 5)
    for found, was in zip(added(ranks, of), before, strict=True):
        assert torch.equal(found, was * 2)
    assert ranks.exchanged == [20, 10, 5]


def test_a_gradient_as_large_as_the_buffer_is_not_copied_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 40)
    ranks = WithTwin([True] * 3)
    added(ranks, parameters((4,), (10,), (3,)))
    assert ranks.exchanged == [10, 7]


def test_each_type_has_a_buffer_no_larger_than_its_gradients_and_the_exchange_has_its_room():
    single, double = parameters((4,), (2, 3)), [nn.Parameter(torch.zeros(5, dtype=torch.float64))]
    double[0].grad = torch.full_like(double[0], 1 / 3)
    ranks = WithTwin([True] * 3)
    recorder = Recorder(phase=lambda: "backward")
    with recorder:
        found = added(ranks, [*single, *double])
    trace = recorder.trace("measured", "cpu")
    shapes = {trace.texts[number] for number in trace.storages.shape}
    assert {"float32[10]", "float64[5]", "uint8[8388608]"} <= shapes
    assert sorted(ranks.exchanged) == [5, 10]
    assert found[2].tolist() == [2 / 3] * 5


def test_frozen_parameters_and_parts_of_sharded_ones_are_left_out():
    own, frozen, part = parameters((2,), (3,), (4,))
    frozen.requires_grad_(False)
    part.is_part = True  # type: ignore[attr-defined]
    ranks = WithTwin([True])
    added(ranks, [own, frozen, part])
    assert ranks.exchanged == [2]


@pytest.mark.parametrize(
    ("shape", "exchanged"),
    [
        ((6, 4), [8] * 3),
        ((3, 30), [10] * 9),
        ((2, 3, 25), [10, 10, 5] * 6),
        ((2, 5), [10]),  # as large as the buffer
        ((3, 10), [10] * 3),
        ((7, 2), [10, 4]),
    ],
)
def test_a_large_gradient_that_is_not_contiguous_goes_in_parts(monkeypatch: pytest.MonkeyPatch, shape, exchanged):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 40)
    (parameter,) = parameters(shape)
    parameter.grad = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    before = parameter.grad.clone()
    assert not parameter.grad.is_contiguous()
    ranks = WithTwin([True])
    (found,) = added(ranks, [parameter])
    assert torch.equal(found, before * 2)
    assert ranks.exchanged == exchanged


def test_a_gradient_that_only_another_rank_has_is_filled_in_with_zeros():
    own, peers, nobodys = parameters((2,), (3,), (4,))
    peers.grad = nobodys.grad = None
    one = Reduction(WithTwin([False, True, False]), [own, peers, nobodys])
    assert one.add_up_loss(1.5) == 11.5
    assert one.has_gaps
    one.fill()
    assert torch.equal(peers.grad, torch.zeros(3))
    assert nobodys.grad is None  # the optimizer skips it, as with one process


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match=r"of shape \(5, 3\) is sparse and cannot be summed over 2 ranks"):
        Reduction(WithTwin([True]), table.parameters()).prepare()


def test_a_parameter_that_is_in_both_lists_counts_once():
    (one,) = parameters((4,))
    ranks = WithTwin([True])
    assert torch.equal(added(ranks, [one, one])[0], (torch.arange(4.0) + 1) * 2)
    assert ranks.exchanged == [4]
