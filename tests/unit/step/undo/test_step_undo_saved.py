"""Saved copies are restored: values, sizes, memory addresses, and the states of generators."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from plimsoll.step.undo.saved import SavedArray, SavedGenerator, SavedPlace, SavedTensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16), torch.ones(1).expand(3),
        torch.arange(6)[1:3], torch.ones(2, 2).to_sparse(),
    ],
    ids=["floats", "booleans", "halves", "expanded", "a view", "sparse"],
)  # fmt: skip
def test_what_a_tensor_held_is_put_back_and_told_from_what_it_holds(tensor):
    values = tensor.to_dense().clone() if tensor.is_sparse else tensor.clone()
    saved = SavedTensor.of(tensor)
    if tensor.is_sparse:
        tensor.mul_(0)
    else:
        assert not saved.is_changed()
        tensor.data[:1] = 0
        assert saved.is_changed()
    saved.restore()
    assert torch.equal(tensor.to_dense() if tensor.is_sparse else tensor, values)


def test_a_storage_that_was_made_longer_is_as_long_as_before():
    tensor = torch.ones(2)
    saved = SavedTensor.of(tensor)
    tensor.resize_(8).zero_()
    assert saved.is_changed()
    saved.restore()
    assert torch.equal(tensor[:2], torch.ones(2))
    assert tensor.untyped_storage().nbytes() == 8


def test_a_copy_is_made_in_the_memory_of_an_earlier_one_that_is_as_large():
    first = SavedTensor.of(torch.ones(2))
    second, third = (SavedTensor.of(torch.zeros(size), first.content) for size in (2, 3))
    assert second.content is first.content
    assert third.content is not first.content


@pytest.mark.parametrize(
    "move", [lambda one: setattr(one, "data", torch.zeros(3)), lambda one: one.set_(torch.ones(1))]
)
def test_where_a_tensor_lies_is_put_back(move):
    tensor = torch.arange(2.0)
    saved = SavedPlace.of(tensor)
    assert not saved.is_changed()
    move(tensor)
    assert saved.is_changed()
    saved.restore()
    assert torch.equal(tensor, torch.arange(2.0))


def test_an_array_is_put_back():
    array = numpy.ones(2)
    saved = SavedArray(array, array.copy())
    array[:] = float("nan")
    assert saved.is_changed()
    saved.restore()
    assert array.tolist() == [1, 1]
    assert not saved.is_changed()


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator().manual_seed(0), lambda one: torch.rand(1, generator=one).item()),
        (random.Random(0), random.Random.random),
        (numpy.random.default_rng(0), lambda one: one.random()),
        (numpy.random.RandomState(0), lambda one: one.rand()),
    ],
    ids=["torch", "python", "numpy", "numpy's older"],
)
def test_a_generator_draws_the_same_again(generator, draw):
    saved = SavedGenerator.of(generator)
    drawn = [draw(generator) for _ in range(2)]
    for _ in range(2):
        saved.restore()
        assert [draw(generator) for _ in range(2)] == drawn
