"""torch's recurrent layers over a part of time at a time: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``.

What stands in for a layer's forward takes what that takes and returns what that returns; torch's own kernels do the
work, on slices. `ComposedLayer` is what all have in common. `SegmentedLayer` computes segments again in backward;
another is in `plimsoll.techniques.packed_stretches`.

Does NOT cover subclasses with a forward of their own, and loops over ``nn.LSTMCell`` in a model's code: see
`plimsoll.models.recurrent.cells`.

Shapes: B samples, T steps, N rows of a packed batch, H hidden size, L layers.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, sqrt
from typing import Any, NamedTuple

import torch
from torch import _VF, Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from plimsoll.memory.known_values import values_of
from plimsoll.models.recurrent.segments import Passed, State, as_hidden, as_state
from plimsoll.techniques.mechanisms.segment_recompute import Walk, equal_spans, over_time

_KERNELS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": _VF.lstm,
    "GRU": _VF.gru,
    "RNN_TANH": _VF.rnn_tanh,
    "RNN_RELU": _VF.rnn_relu,
}
_QUICK_STEPS = 128  # 1.25 times the seconds of plain on one core of a CPU, where 45 steps take 1.6 (LSTM 2 x 512)
_FORWARDS = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)


class Cut(NamedTuple):
    """How time is cut: ``steps`` of a segment (0: see `default_steps`), and states kept (0: all)."""

    steps: int
    kept: int = 0

    def spans(self, num_steps: int) -> tuple[tuple[int, int], ...]:
        """Cut a sequence of so many steps."""
        return equal_spans(num_steps, self.steps or default_steps(num_steps))

    @property
    def num_slots(self) -> int | None:
        """States kept beside the first; ``None`` for all."""
        return self.kept or None


def default_steps(num_steps: int) -> int:
    """Return the square root of a length, or up to 128: in shorter segments a kernel prepares as long as it steps.

    >>> default_steps(12), default_steps(1000), default_steps(100_000)
    (4, 128, 317)
    """
    return max(ceil(sqrt(num_steps)), min(_QUICK_STEPS, num_steps // 4), 1)


def is_plain_layer(module: nn.Module) -> bool:
    """Whether a module is a recurrent layer of torch's whose forward is torch's own."""
    return isinstance(module, nn.RNNBase) and type(module).forward in _FORWARDS


class ComposedLayer(ABC):
    """The forward of a recurrent layer, composed of calls of torch's kernels for some layers and one direction.

    An object, so that a copy of the model gets its own layer's.
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        functools.update_wrapper(self, type(layer).forward)
        self._layer = layer

    @abstractmethod
    def __call__(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """As the layer's own forward."""

    @abstractmethod
    def _one_way(self, sequences: Sequences, state: State, layers: range, direction: int) -> tuple[Tensor, State]:
        """Some layers in one direction; ``direction`` 1 goes from the last step to the first."""

    def _packed(self, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        sizes = values_of(batch_sizes)
        state = as_state(hx)
        if not state:
            state = self._zeros(data, sizes[0])
        elif sorted_indices is not None:
            state = tuple(part.index_select(1, sorted_indices) for part in state)
        self._layer.check_forward_args(data, as_hidden(state), batch_sizes)
        output, state = self._through(Sequences(data, 0, sizes), state)
        if unsorted_indices is not None:
            state = tuple(part.index_select(1, unsorted_indices) for part in state)
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), as_hidden(state)

    def _zeros(self, data: Tensor, num_samples: int) -> State:
        layer = self._layer
        rows = layer.num_layers * (1 + layer.bidirectional)
        widths = [layer.proj_size or layer.hidden_size] + [layer.hidden_size] * (layer.mode == "LSTM")
        return tuple(data.new_zeros(rows, num_samples, width) for width in widths)

    def _through(self, sequences: Sequences, state: State) -> tuple[Tensor, State]:
        """All layers, in one or two directions.

        In one direction nothing but the input, the output and states is as long as the sequence. In two each layer
        needs the one before it as a whole, and what the layers return stays (for L layers, L times the output).
        """
        layer = self._layer
        if not layer.bidirectional:
            return self._one_way(sequences, state, range(layer.num_layers), 0)
        ends: list[State] = []
        for number in range(layer.num_layers):
            if number:
                sequences = sequences._replace(data=self._dropped(sequences.data))
            outputs = []
            for direction in range(2):
                row = 2 * number + direction
                first = tuple(part[row : row + 1] for part in state)
                output, end = self._one_way(sequences, first, range(number, number + 1), direction)
                outputs.append(output)
                ends.append(end)
            sequences = sequences._replace(data=torch.cat(outputs, -1))
        return sequences.data, tuple(torch.cat(parts) for parts in zip(*ends, strict=True))

    def _together(self, part: Sequences, state: State, weights: list[list[Tensor]]) -> tuple[Tensor, State]:
        """Some layers over all steps of a part, with dropout between them."""
        if not self._draws or len(weights) == 1:
            return self._kernel(part, state, weights)
        # On CUDA the weights of one layer of several are no single block, and cuDNN joins them anew for each segment.
        ends: list[State] = []
        for number, of_layer in enumerate(weights):
            if number:
                part = part._replace(data=self._dropped(part.data))
            output, end = self._kernel(part, tuple(rows[number : number + 1] for rows in state), [of_layer])
            part = part._replace(data=output)
            ends.append(end)
        return part.data, tuple(torch.cat(parts) for parts in zip(*ends, strict=True))

    def _kernel(self, part: Sequences, state: State, weights: list[list[Tensor]]) -> tuple[Tensor, State]:
        layer = self._layer
        flat = [weight for of_layer in weights for weight in of_layer]
        hidden = state if layer.mode == "LSTM" else state[0]
        options = (layer.bias, len(weights), 0.0, layer.training, False)
        kernel = _KERNELS[layer.mode]
        if part.batch_sizes is not None:
            output, *end = kernel(part.data, torch.tensor(part.batch_sizes), hidden, flat, *options)
        else:
            output, *end = kernel(part.data, hidden, flat, *options, part.dim == 1)
        return output, tuple(end)

    def _weights(self, number: int, direction: int) -> list[Tensor]:
        layer = self._layer
        per_row = 2 + 2 * layer.bias + (layer.proj_size > 0)
        begin = (number * (1 + layer.bidirectional) + direction) * per_row
        # By name: what a parametrization or `functional_call` puts there is not in the layer's own list.
        return [getattr(layer, name) for name in layer._flat_weights_names[begin : begin + per_row]]

    @property
    def _draws(self) -> bool:
        return self._layer.training and self._layer.dropout > 0

    def _dropped(self, data: Tensor) -> Tensor:
        # What cuDNN draws could not be drawn again in backward.
        return functional.dropout(data, self._layer.dropout, self._layer.training)


class SegmentedLayer(ComposedLayer):
    """The forward of a recurrent layer in segments, of batches, one sequence and packed sequences.

    A packed batch is cut in steps, not in rows. cuDNN takes at most 65,535 steps in one call: here there is no such
    limit.
    """

    def __init__(self, layer: nn.RNNBase, cut: Cut) -> None:
        super().__init__(layer)
        self._cut = cut

    def __call__(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """As the layer's own forward."""
        layer = self._layer
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.dim() not in {2, 3}:
            raise ValueError(f"{type(layer).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead")
        is_single, batch_dim = input.dim() == 2, 0 if layer.batch_first else 1
        if input.shape[0 if is_single else 1 - batch_dim] == 0:
            return type(layer).forward(layer, input, hx)  # type: ignore[no-any-return]  # which refuses it
        data = input.unsqueeze(batch_dim) if is_single else input
        state = as_state(hx)
        if is_single and state and state[0].dim() == 2:
            state = tuple(part.unsqueeze(1) for part in state)
        if not state:
            state = self._zeros(data, data.shape[batch_dim])
        layer.check_forward_args(data, as_hidden(state), None)
        output, state = self._through(Sequences(data, 1 - batch_dim, None), state)
        if is_single:
            output, state = output.squeeze(batch_dim), tuple(part.squeeze(1) for part in state)
        return output, as_hidden(state)

    def _one_way(self, sequences: Sequences, state: State, layers: range, direction: int) -> tuple[Tensor, State]:
        """Some layers in one direction; ``direction`` 1 goes from the last step to the first."""
        weights = [self._weights(number, direction) for number in layers]
        is_padded_back = direction == 1 and sequences.batch_sizes is None
        reversal = sequences.reversal() if direction == 1 and sequences.batch_sizes is not None else None
        data = sequences.data if reversal is None else sequences.data.index_select(0, reversal)
        bounds = self._cut.spans(sequences.num_steps)
        spans = sequences.in_rows(bounds)
        if is_padded_back:
            bounds, spans = bounds[::-1], spans[::-1]

        def run(segment: int, state: State, slices: tuple[Tensor, ...]) -> Passed:
            data = slices[0].flip(sequences.dim) if is_padded_back else slices[0]
            part = Sequences(data, sequences.dim, sequences.sizes_in(bounds[segment]))
            output, state = self._segment(part, state, weights)
            return Passed((output.flip(sequences.dim) if is_padded_back else output,), state=state)

        flat = [weight for of_layer in weights for weight in of_layer]
        walk = Walk(run, spans, sequences.dim, self._cut.num_slots, draws=self._draws and len(layers) > 1)
        passed = over_time(walk, (data,), state, flat)
        output = passed.outputs[0]
        return (output if reversal is None else output.index_select(0, reversal)), passed.state

    def _segment(self, part: Sequences, state: State, weights: list[list[Tensor]]) -> tuple[Tensor, State]:
        """One segment through some layers; samples of a packed batch that have ended keep the state they had."""
        sizes = part.batch_sizes
        if sizes is None or sizes[0] == state[0].shape[1]:
            return self._together(part, state, weights)
        waiting = tuple(rows[:, sizes[0] :] for rows in state)
        data, state = self._together(part, tuple(rows[:, : sizes[0]] for rows in state), weights)
        return data, tuple(torch.cat(pair, 1) for pair in zip(state, waiting, strict=True))


class Sequences(NamedTuple):
    """A batch of sequences: the dimension of its steps and, if it is packed, the samples of each step."""

    data: Tensor
    dim: int
    batch_sizes: list[int] | None

    @property
    def num_steps(self) -> int:
        """How many steps the longest sequence has."""
        return self.data.shape[self.dim] if self.batch_sizes is None else len(self.batch_sizes)

    def in_rows(self, bounds: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Say spans of steps as spans of the data."""
        if self.batch_sizes is None:
            return tuple(bounds)
        ends = [0, *accumulate(self.batch_sizes)]
        return tuple((ends[start], ends[start + length] - ends[start]) for start, length in bounds)

    def sizes_in(self, bound: tuple[int, int]) -> list[int] | None:
        """Return the samples of each step of a span."""
        start, length = bound
        return None if self.batch_sizes is None else self.batch_sizes[start : start + length]

    def reversal(self) -> Tensor:
        """Return, for each row of a packed batch, the row that has its place when every sample is read backwards."""
        assert self.batch_sizes is not None
        sizes = torch.tensor(self.batch_sizes)
        begins = sizes.cumsum(0) - sizes
        step_N = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        sample_N = torch.arange(int(sizes.sum())) - begins[step_N]
        length_B = (sizes[:, None] > torch.arange(self.batch_sizes[0])).sum(0)
        return (begins[length_B[sample_N] - 1 - step_N] + sample_N).to(self.data.device)
