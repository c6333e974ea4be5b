"""The test that blocks are alike, and the differences that it finds."""

from functools import partial

import pytest
import torch
from torch import nn

from plimsoll.step.folding.alike import are_alike, rows_of


class Block(nn.Module):
    def __init__(self, number=0, width=8):
        super().__init__()
        self.number, self.scale, self.act = number, 2, partial(torch.nn.functional.gelu, approximate="tanh")
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, width)
        self.register_buffer("mask", torch.zeros(3))


def model(blocks):
    whole = nn.Module()
    whole.head, whole.layers = nn.Linear(8, 2), nn.ModuleList(blocks)
    return whole


def changed(change, number=1):
    block = Block(number)
    change(block)
    return block


CHANGES = {
    "a setting": lambda block: setattr(block, "scale", 3),
    "a setting that is the number of the other": lambda block: setattr(block, "scale", 0),
    "a setting of another type": lambda block: setattr(block, "scale", 2.0),
    "a truth that equals its number": lambda block: setattr(block, "number", True),
    "a setting more": lambda block: setattr(block, "more", None),
    "an object of its own": lambda block: setattr(block, "act", lambda value: value),
    "arguments of a function": lambda block: setattr(
        block, "act", partial(torch.nn.functional.gelu, approximate="none")
    ),
    "a list": lambda block: setattr(block, "scale", [2]),
    "a hook": lambda block: block.linear.register_forward_hook(lambda *called: None),
    "a shape": lambda block: setattr(block, "linear", nn.Linear(8, 4)),
    "no bias": lambda block: setattr(block, "linear", nn.Linear(8, 8, bias=False)),
    "a type": lambda block: block.linear.half(),
    "a class": lambda block: setattr(block, "norm", nn.RMSNorm(8)),
    "a frozen weight": lambda block: block.linear.weight.requires_grad_(False),
    "a buffer": lambda block: block.register_buffer("mask", torch.zeros(4)),
    "not training": lambda block: block.norm.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_blocks_that_differ_in_anything_are_not_alike(change):
    assert are_alike(Block(0), 0, Block(1), 1)
    assert not are_alike(Block(0), 0, changed(CHANGES[change]), 1)


def test_the_number_of_a_block_is_its_own():
    assert are_alike(Block(4), 4, Block(7), 7)
    assert not are_alike(Block(4), 4, Block(5), 7)


def test_rows_are_three_or_more_that_follow_one_another():
    blocks = [Block(0), Block(1), Block(2), Block(3, width=4), Block(4), Block(5)]
    assert [*rows_of(model(blocks))] == [blocks[:3]]
    assert [*rows_of(model(blocks[:2]))] == []


def test_blocks_that_share_parameters_are_no_row():
    blocks = [*map(Block, range(4))]
    blocks[2].linear = blocks[0].linear
    assert [*rows_of(model(blocks))] == []
    assert [*rows_of(model([Block()] * 4))] == []
