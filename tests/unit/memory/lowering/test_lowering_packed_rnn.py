"""Recurrent nets over packed sequences: a traced step allocates exactly the bytes of a real one."""

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
from processor import skip_without_half_lstm

DATA = torch.ones(5, 3, 6)
LENGTHS = {
    "uneven": torch.tensor([5, 3, 1]),
    "alike": torch.tensor([5, 5, 5]),
    "alike and short": torch.tensor([4, 4, 4]),
}
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


def traces(
    module: nn.Module, lengths: torch.Tensor, precision: torch.dtype | None = None, data: torch.Tensor = DATA
) -> tuple[Trace, Trace]:
    """Return the predicted and the measured trace of one forward and backward pass."""

    def train(model: nn.Module, data: torch.Tensor, lengths: torch.Tensor) -> None:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            run(model, data, lengths)

    def run(model: nn.Module, data: torch.Tensor, lengths: torch.Tensor) -> None:
        output, state = model(pack_padded_sequence(data, lengths))
        last = state if isinstance(state, torch.Tensor) else state[0]
        (output.data.sum() + last.sum()).backward()

    predicted = trace_training(
        lambda place: train(place.fake_model(module), *place.fake_batch((data, lengths))), CpuLowering()
    )
    measured = measure_training(lambda run: train(module, *run.know_batch((data, lengths))))
    return predicted, measured


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_training_step_takes_the_bytes_of_the_real_one(lengths: torch.Tensor, cell: str, options: dict):
    make, more = CELLS[cell]
    predicted, measured = traces(make(6, 8, **options, **more), lengths)
    assert compare(predicted, measured).is_equal
    assert made_by_the_net(predicted) == made_by_the_net(measured)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_so_it_does_in_other_types(lengths: torch.Tensor, dtype: torch.dtype):
    """oneDNN lacks an LSTM in float64, and a float16 LSTM that torch could train."""
    predicted, measured = traces(nn.LSTM(6, 8, 2, bidirectional=True).to(dtype), lengths, data=DATA.to(dtype))
    assert compare(predicted, measured).is_equal


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_so_it_does_under_autocast(lengths: torch.Tensor, cell: str):
    make, more = CELLS[cell]
    module = make(6, 8, num_layers=2, **more)
    if lengths is not LENGTHS["uneven"]:  # whose steps are torch's own
        skip_without_half_lstm(module)
    predicted, measured = traces(module, lengths, torch.bfloat16)
    assert compare(predicted, measured).is_equal


def test_an_lstm_of_samples_that_are_alike_is_onednns_and_others_are_not():
    for name, lengths in LENGTHS.items():
        predicted, measured = traces(nn.LSTM(6, 8), lengths)
        for trace in (predicted, measured):
            ops = [trace.texts[number] for number in trace.ops.name]
            assert ("aten.mkldnn_rnn_layer.default" in ops) == name.startswith("alike")


def made_by_the_net(trace: Trace) -> Counter[tuple[str, str, str]]:
    """Count the storages of the forward and backward pass of the net, by phase, op and shape."""
    texts, ops, table = trace.texts, trace.ops, trace.storages
    found = Counter(
        (ops.phase[born], texts[ops.name[born]], texts[shape])
        for born, shape in zip(table.born, table.shape, strict=True)
        if texts[ops.module[born]] in {"LSTM", "GRU", "RNN"}
        and not texts[shape].startswith("scratch")  # as predicted only
    )
    assert found
    return found


def test_the_results_have_the_shapes_of_the_real_ones():
    module, uneven = nn.LSTM(6, 8, num_layers=2, bidirectional=True, proj_size=4), LENGTHS["uneven"]
    real, (real_hidden, real_memory) = module(pack_padded_sequence(DATA, uneven))
    shapes = []

    def train(place) -> None:
        data, lengths = place.fake_batch((DATA, uneven))
        output, (hidden, memory) = place.fake_model(module)(pack_padded_sequence(data, lengths))
        shapes.extend([output.data.shape, hidden.shape, memory.shape])

    trace_training(train, CpuLowering())
    assert shapes == [real.data.shape, real_hidden.shape, real_memory.shape]
