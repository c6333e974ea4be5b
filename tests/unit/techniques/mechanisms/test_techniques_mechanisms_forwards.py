"""A forward is replaced on the instance, and later restored."""

import copy

import pytest
from torch import nn

from plimsoll.techniques.mechanisms.forwards import replaced_forward


def test_it_is_replaced_and_put_back():
    layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with replaced_forward(layer, lambda: "replaced"):
        assert layer() == "replaced"
        assert "forward" not in vars(other)
        assert "forward" in vars(copy.copy(layer))
    assert "forward" not in vars(layer)


def test_one_that_was_replaced_before_is_put_back_after_an_error():
    layer = nn.Linear(1, 1)
    layer.forward = lambda: "before"
    with pytest.raises(KeyError), replaced_forward(layer, lambda: "replaced"):
        raise KeyError
    assert layer() == "before"
