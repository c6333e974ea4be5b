"""The lines that made storages."""

import torch

from plimsoll.memory.births import Births


def test_what_is_made_is_noted_and_what_is_changed_in_place_is_not():
    lines = iter(["first", "second", "third"])
    with Births(lambda: next(lines)) as births:
        made = torch.zeros(64, 1024)
        made.add_(1)
        made[1:].view(-1)
        small = torch.zeros(10)
        other = made * 2
    assert births.lines[made.untyped_storage().data_ptr()] == "first"
    assert births.lines[other.untyped_storage().data_ptr()] == "second"
    assert small.untyped_storage().data_ptr() not in births.lines


def test_gradients_stay_what_they_are():
    weight = torch.ones(64, 1024, requires_grad=True)
    with Births(lambda: "line"):
        (weight * 2 + weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 5))
