"""Recurrent nets over packed sequences: a step takes, to the byte, what it takes with the real nets."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from plimsoll.memory.compare import compare
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.measure import measure_training
from plimsoll.memory.trace import trace_training
from plimsoll.records.trace import Trace

DATA, LENGTHS = torch.ones(5, 3, 6), torch.tensor([5, 3, 1])
CELLS = {
    "lstm": (nn.LSTM, {}),
    "projected lstm": (nn.LSTM, {"proj_size": 4}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
SHAPES = [
    pytest.param(
        {"num_layers": layers, "bidirectional": both, "dropout": dropout, "bias": bias},
        id=f"{layers} layers{', both ways' * both}{', dropout' * bool(dropout)}{', no bias' * (not bias)}",
    )
    for layers, both, dropout, bias in product((1, 2), (False, True), (0.0, 0.5), (True, False))
    if layers > 1 or not dropout
]


def traces(module: nn.Module) -> tuple[Trace, Trace]:
    """The same forward and backward pass, predicted and measured."""

    def train(model: nn.Module, data: torch.Tensor, lengths: torch.Tensor) -> None:
        output, state = model(pack_padded_sequence(data, lengths))
        last = state if isinstance(state, torch.Tensor) else state[0]
        (output.data.sum() + last.sum()).backward()

    predicted = trace_training(
        lambda place: train(place.fake_model(module), *place.fake_batch((DATA, LENGTHS))), CpuLowering()
    )
    measured = measure_training(lambda run: train(module, *run.know_batch((DATA, LENGTHS))))
    return predicted, measured


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_training_step_takes_the_bytes_of_the_real_one(cell: str, options: dict):
    make, more = CELLS[cell]
    predicted, measured = traces(make(6, 8, **options, **more))
    assert compare(predicted, measured).is_equal
    assert made_by_the_net(predicted) == made_by_the_net(measured)


def made_by_the_net(trace: Trace) -> Counter[tuple[str, str, str]]:
    """The storages that the net's forward and backward pass made: the phase, the op and the shape."""
    texts, ops, table = trace.texts, trace.ops, trace.storages
    found = Counter(
        (ops.phase[born], texts[ops.name[born]], texts[shape])
        for born, shape in zip(table.born, table.shape, strict=True)
        if texts[ops.module[born]] in {"LSTM", "GRU", "RNN"}
    )
    assert found
    return found


def test_the_results_have_the_shapes_of_the_real_ones():
    module = nn.LSTM(6, 8, num_layers=2, bidirectional=True, proj_size=4)
    real, (real_hidden, real_memory) = module(pack_padded_sequence(DATA, LENGTHS))
    shapes = []

    def train(place) -> None:
        data, lengths = place.fake_batch((DATA, LENGTHS))
        output, (hidden, memory) = place.fake_model(module)(pack_padded_sequence(data, lengths))
        shapes.extend([output.data.shape, hidden.shape, memory.shape])

    trace_training(train, CpuLowering())
    assert shapes == [real.data.shape, real_hidden.shape, real_memory.shape]
