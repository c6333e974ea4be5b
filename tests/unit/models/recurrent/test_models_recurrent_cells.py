"""A cell unrolled over time equals the hand-written loop."""

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.models.recurrent.cells import StateForm, UnrolledCell, state_of_cell


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, input, state):
        state = self.linear(input) if state is None else 0.5 * state + self.linear(input)
        return state.tanh(), state


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, Leaky])
def test_it_is_the_loop(kind, batch_first):
    torch.manual_seed(0)
    cell = kind() if kind is Leaky else kind(3, 4)
    inputs = torch.randn(5, 2, 3)
    state, expected = None, []
    for step_input in inputs:
        result = cell(step_input, state)
        output, state = result if kind is Leaky else (result if torch.is_tensor(result) else result[0], result)
        expected.append(output)
    layer = UnrolledCell(cell, batch_first)
    outputs, last = layer(inputs.transpose(0, 1) if batch_first else inputs)
    assert torch.equal(outputs.transpose(0, 1) if batch_first else outputs, torch.stack(expected))
    assert all(map(torch.equal, state_of_cell(last), state_of_cell(state)))


def test_a_state_is_one_tensor_or_a_tuple():
    one = torch.zeros(1)
    assert state_of_cell(None) == ()
    for given in (one, (one,), (one, one)):
        again = StateForm.of(given).given(state_of_cell(given))
        assert again is given or (type(again) is tuple and again == given)
    assert StateForm.of(None).given(()) is None
    with pytest.raises(InputError, match="the state of a cell has a int among its 2 parts: use a tensor"):
        state_of_cell((one, 3))


class NoPair(nn.Module):
    def forward(self, input, state):
        return input


def test_what_cannot_be_unrolled_is_refused():
    with pytest.raises(InputError, match=r"NoPair returned a Tensor from one step.*return \(output, state\)"):
        UnrolledCell(NoPair())(torch.ones(2, 1, 3))
    with pytest.raises(InputError, match=r"shape \[2, 0, 3\], which has no steps in dimension 1: give at least 1"):
        UnrolledCell(NoPair(), batch_first=True)(torch.ones(2, 0, 3))
