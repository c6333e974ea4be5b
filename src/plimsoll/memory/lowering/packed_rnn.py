"""Recurrent nets over packed sequences on the CPU, step by step, on fake tensors: torch's kernels read the batch sizes.

The ops and their order are as in ``aten/src/ATen/native/RNN.cpp`` (torch 2.13): PackedLayer, ReversedPackedLayer,
PackedBidirectionalLayer, apply_layer_stack, and the cells without a fused kernel. An LSTM whose samples have equal
lengths runs as if they were not packed, by oneDNN if possible (observed in torch 2.13). Shapes: N packed tokens, B
samples, H hidden size, P projected size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from plimsoll.memory.known_values import values_of

State = tuple[Tensor, ...]
"""The hidden state of one layer and direction; for an LSTM also the cell state."""


class _Weights(NamedTuple):
    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None


Cell = Callable[[Tensor, State, _Weights], State]
"""``(input after its linear layer, state, weights) -> state`` for one step."""


def _lstm_cell(step_input: Tensor, state: State, weights: _Weights) -> State:
    hidden, memory = state
    gates = functional.linear(hidden, weights.hidden, weights.hidden_bias).add_(step_input)
    parts = gates.unsafe_chunk(4, 1)
    in_gate, forget_gate, cell_gate, out_gate = (
        parts[0].sigmoid_(),
        parts[1].sigmoid_(),
        parts[2].tanh_(),
        parts[3].sigmoid_(),
    )
    memory = (forget_gate * memory).add_(in_gate * cell_gate)
    hidden = out_gate * memory.tanh()
    return (hidden if weights.projection is None else hidden @ weights.projection.t()), memory


def _gru_cell(step_input: Tensor, state: State, weights: _Weights) -> State:
    (hidden,) = state
    of_input = step_input.unsafe_chunk(3, 1)
    of_hidden = functional.linear(hidden, weights.hidden, weights.hidden_bias).unsafe_chunk(3, 1)
    reset_gate = of_hidden[0].add_(of_input[0]).sigmoid_()
    update_gate = of_hidden[1].add_(of_input[1]).sigmoid_()
    new_gate = of_input[2].add(of_hidden[2].mul_(reset_gate)).tanh_()
    return ((hidden - new_gate).mul_(update_gate).add_(new_gate),)


def _plain_cell(function: Callable[[Tensor], Tensor]) -> Cell:
    def cell(step_input: Tensor, state: State, weights: _Weights) -> State:
        return (function(functional.linear(state[0], weights.hidden, weights.hidden_bias).add_(step_input)),)

    return cell


def _forwards(
    data: Tensor, batch_sizes: list[int], state: State, weights: _Weights, cell: Cell
) -> tuple[Tensor, State]:
    """Run one layer from the first step to the last. A sample is dropped when its sequence ends."""
    projected = functional.linear(data, weights.input, weights.input_bias)
    outputs, finished, offset, size = [], [], 0, batch_sizes[0]
    for batch_size in batch_sizes:
        step_input = projected.narrow(0, offset, batch_size)
        if batch_size < size:
            finished.append(tuple(part.narrow(0, batch_size, size - batch_size) for part in state))
            state = tuple(part.narrow(0, 0, batch_size) for part in state)
        state = cell(step_input, state, weights)
        outputs.append(state[0])
        offset, size = offset + batch_size, batch_size
    finished.append(state)
    return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*reversed(finished), strict=True))


def _backwards(
    data: Tensor, batch_sizes: list[int], first_state: State, weights: _Weights, cell: Cell
) -> tuple[Tensor, State]:
    """Run one layer from the last step to the first. A sample is added where its sequence ends."""
    projected = functional.linear(data, weights.input, weights.input_bias)
    size, offset = batch_sizes[-1], len(data)
    state = tuple(part.narrow(0, 0, size) for part in first_state)
    outputs = []
    for batch_size in reversed(batch_sizes):
        if batch_size > size:
            entering = [part.narrow(0, size, batch_size - size) for part in first_state]
            state = tuple(torch.cat(pair) for pair in zip(state, entering, strict=True))
        offset, size = offset - batch_size, batch_size
        state = cell(projected.narrow(0, offset, batch_size), state, weights)
        outputs.append(state[0])
    return torch.cat(outputs[::-1]), state


def _is_onednns(dtype: torch.dtype) -> bool:
    """Return whether torch uses oneDNN to train an LSTM of a dtype; bfloat16 needs processor support."""
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _grouped(flat: Sequence[Tensor], has_biases: bool, is_projected: bool) -> list[_Weights]:
    """Return the weights of each layer and direction, in the order of ``nn.RNNBase``."""
    stride = 2 + 2 * has_biases + is_projected
    return [
        _Weights(
            flat[start],
            flat[start + 1],
            flat[start + 2] if has_biases else None,
            flat[start + 3] if has_biases else None,
            flat[start + stride - 1] if is_projected else None,
        )
        for start in range(0, len(flat), stride)
    ]


def _stack(  # noqa: PLR0917 -- the arguments of the ops below
    cell: Cell,
    data: Tensor,
    batch_sizes: Tensor,
    states: list[State],
    weights: list[_Weights],
    dropout: float,
    bidirectional: bool,
) -> tuple[Tensor, list[State]]:
    """Run all layers, with dropout between them. ``states`` and ``weights`` have an entry per layer and direction."""
    sizes = values_of(batch_sizes)
    last_states: list[State] = []
    num_directions = 1 + bidirectional
    for first in range(0, len(weights), num_directions):
        directions = slice(first, first + num_directions)
        data = _layer(cell, data, sizes, states[directions], weights[directions], last_states)
        if dropout and first + num_directions < len(weights):
            data = functional.dropout(data, dropout)
    return data, last_states


def _layer(  # noqa: PLR0917 -- as above
    cell: Cell,
    data: Tensor,
    batch_sizes: list[int],
    states: list[State],
    weights: list[_Weights],
    last_states: list[State],
) -> Tensor:
    """Run one layer in all directions. This is a separate function so that temporaries are freed when it returns."""
    output, state = _forwards(data, batch_sizes, states[0], weights[0], cell)
    last_states.append(state)
    if len(states) == 1:
        return output
    reverse_output, state = _backwards(data, batch_sizes, states[1], weights[1], cell)
    last_states.append(state)
    return torch.cat((output, reverse_output), -1)


def _lstm(  # noqa: PLR0917 -- the signature of the op
    data: Tensor,
    batch_sizes: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, is_projected = values_of(batch_sizes), hx[0].shape[2] != hx[1].shape[2]
    if sizes[0] == sizes[-1] and _is_onednns(data.dtype) and not is_projected:
        steps = data.view(len(sizes), sizes[0], -1)
        output, *last_state = torch.lstm(
            steps, tuple(hx), tuple(params), has_biases, num_layers, dropout, train, bidirectional, False
        )
        return output.view(len(data), -1), last_state[0], last_state[1]
    weights = _grouped(params, has_biases, is_projected)
    states: list[State] = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    output, last = _stack(_lstm_cell, data, batch_sizes, states, weights, dropout * train, bidirectional)
    return output, torch.stack([state[0] for state in last]), torch.stack([state[1] for state in last])


def _single_state(cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(  # noqa: PLR0917 -- the signature of the op
        data: Tensor,
        batch_sizes: Tensor,
        hx: Tensor,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, Tensor]:
        states: list[State] = [(state,) for state in hx.unbind(0)]
        weights = _grouped(params, has_biases, is_projected=False)
        output, last = _stack(cell, data, batch_sizes, states, weights, dropout * train, bidirectional)
        return output, torch.stack([state[0] for state in last])

    return run


PACKED_RNN: dict[str, Callable[..., Any]] = {
    "lstm.data": _lstm,
    "gru.data": _single_state(_gru_cell),
    "rnn_tanh.data": _single_state(_plain_cell(torch.tanh)),
    "rnn_relu.data": _single_state(_plain_cell(torch.relu)),
}
