"""The random generators of the host repeat their numbers after a restore."""

import random

import numpy
import torch

from plimsoll.device.cpu.random import copy_host_state, restore_host_state


def _draw():
    return torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist(), numpy.random.randn()


def test_every_generator_draws_the_same_again():
    numpy.random.randn()  # leaves a second normal number in numpy's state
    state = copy_host_state()
    first = _draw()
    assert _draw() != first
    restore_host_state(state)
    assert _draw() == first
