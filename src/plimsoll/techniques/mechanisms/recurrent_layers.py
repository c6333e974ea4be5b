"""Torch's recurrent layers (``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``), computed in segments of time.

The replacement of a layer's forward has the same signature. It runs torch's own kernels on slices of the sequence.
`ComposedLayer` is the base class. `SegmentedLayer` recomputes segments in backward; another subclass is in
`plimsoll.techniques.packed_stretches`.

Not handled: subclasses with their own forward, and loops over ``nn.LSTMCell`` in a model's code; see
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
_QUICK_STEPS = 128  # 1.25 times the time of a plain LSTM (2 x 512) on one CPU core; segments of 45 steps take 1.6 times
_FORWARDS = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)


class Cut(NamedTuple):
    """The segmentation: ``steps`` per segment (0: `default_steps`), and the number of ``kept`` states (0: all)."""

    steps: int
    kept: int = 0

    def spans(self, num_steps: int) -> tuple[tuple[int, int], ...]:
        """Return the first step and the length of each segment of a sequence."""
        return equal_spans(num_steps, self.steps or default_steps(num_steps))

    @property
    def num_slots(self) -> int | None:
        """The number of states to keep in addition to the first; ``None`` for all."""
        return self.kept or None


def default_steps(num_steps: int) -> int:
    """Return the steps per segment: the square root of the length or, if more, a quarter of it up to 128.

    In shorter segments, the setup of a kernel takes as long as its steps.

    >>> default_steps(12), default_steps(1000), default_steps(100_000)
    (4, 128, 317)
    """
    return max(ceil(sqrt(num_steps)), min(_QUICK_STEPS, num_steps // 4), 1)


def is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module is one of torch's recurrent layers with torch's own forward."""
    return isinstance(module, nn.RNNBase) and type(module).forward in _FORWARDS


class ComposedLayer(ABC):
    """The forward of a recurrent module as several kernel calls, each for some of its layers in one direction.

    It is an object, not a closure, so that a deep copy of the model calls its own layers.
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        functools.update_wrapper(self, type(layer).forward)
        self._layer = layer

    @abstractmethod
    def __call__(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """Compute the layer's forward."""

    @abstractmethod
    def _one_way(self, sequences: Sequences, state: State, layers: range, direction: int) -> tuple[Tensor, State]:
        """Return the outputs and the last state of ``layers`` in one direction.

        ``direction``: 0 runs forward in time, 1 from the last step to the first.
        """

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
        """Return the outputs of the last layer and the last states of all layers, in one or two directions.

        With one direction, only the input, the output and the kept states grow with the length of the sequence. With
        two, each layer needs the complete output of the previous layer, so the outputs of all L layers are retained.
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
        """Return the outputs and the last state of some layers over ``part``, with dropout between the layers."""
        if not self._draws or len(weights) == 1:
            return self._kernel(part, state, weights)
        # On CUDA, the weights of one of several layers are not contiguous, so cuDNN copies them for each segment.
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
        # By name, because the layer's own list misses parametrizations and replacements by `functional_call`.
        return [getattr(layer, name) for name in layer._flat_weights_names[begin : begin + per_row]]

    @property
    def _draws(self) -> bool:
        return self._layer.training and self._layer.dropout > 0

    def _dropped(self, data: Tensor) -> Tensor:
        # Dropout inside cuDNN could not be repeated in backward.
        return functional.dropout(data, self._layer.dropout, self._layer.training)


class SegmentedLayer(ComposedLayer):
    """The forward of a recurrent module in segments, for batches, single sequences and packed sequences.

    A packed batch is split by steps, not by rows. Unlike cuDNN, which takes at most 65,535 steps per call, it has no
    limit.
    """

    def __init__(self, layer: nn.RNNBase, cut: Cut) -> None:
        super().__init__(layer)
        self._cut = cut

    def __call__(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """Compute the layer's forward."""
        layer = self._layer
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.dim() not in {2, 3}:
            raise ValueError(f"{type(layer).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead")
        is_single, batch_dim = input.dim() == 2, 0 if layer.batch_first else 1
        if input.shape[0 if is_single else 1 - batch_dim] == 0:
            return type(layer).forward(layer, input, hx)  # type: ignore[no-any-return]  # which raises the error
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
        """Return the outputs and the last state of ``layers`` in one direction.

        ``direction``: 0 runs forward in time, 1 from the last step to the first.
        """
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
        """Return the outputs and the last state of some layers over the segment ``part``.

        In a packed batch, samples that have ended keep their state.
        """
        sizes = part.batch_sizes
        if sizes is None or sizes[0] == state[0].shape[1]:
            return self._together(part, state, weights)
        waiting = tuple(rows[:, sizes[0] :] for rows in state)
        data, state = self._together(part, tuple(rows[:, : sizes[0]] for rows in state), weights)
        return data, tuple(torch.cat(pair, 1) for pair in zip(state, waiting, strict=True))


class Sequences(NamedTuple):
    """A batch of sequences, with its time dimension and, if it is packed, the number of samples at each step."""

    data: Tensor
    dim: int
    batch_sizes: list[int] | None

    @property
    def num_steps(self) -> int:
        """The number of steps of the longest sequence."""
        return self.data.shape[self.dim] if self.batch_sizes is None else len(self.batch_sizes)

    def in_rows(self, bounds: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Convert spans of steps to spans of rows of ``data`` (first index and length)."""
        if self.batch_sizes is None:
            return tuple(bounds)
        ends = [0, *accumulate(self.batch_sizes)]
        return tuple((ends[start], ends[start + length] - ends[start]) for start, length in bounds)

    def sizes_in(self, bound: tuple[int, int]) -> list[int] | None:
        """Return the number of samples at each step of a span; ``None`` if the batch is not packed."""
        start, length = bound
        return None if self.batch_sizes is None else self.batch_sizes[start : start + length]

    def reversal(self) -> Tensor:
        """Return the order of the rows (N,) that reverses every sample of a packed batch in time."""
        assert self.batch_sizes is not None
        sizes = torch.tensor(self.batch_sizes)
        begins = sizes.cumsum(0) - sizes
        step_N = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        sample_N = torch.arange(int(sizes.sum())) - begins[step_N]
        length_B = (sizes[:, None] > torch.arange(self.batch_sizes[0])).sum(0)
        return (begins[length_B[sample_N] - 1 - step_N] + sample_N).to(self.data.device)
