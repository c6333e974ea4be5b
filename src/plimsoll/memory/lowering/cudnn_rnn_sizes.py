"""What cuDNN's recurrent kernels take beside the tensors: the reserve kept for backward, the workspace of one call.

cuDNN tells the sizes only at run time (``cudnnGetRNNTempSpaceSizes``, in ``get_num_weights`` and ``_cudnn_rnn`` of
aten/src/ATen/native/cudnn/RNN.cpp) and publishes no rule. The formulas are fitted to what an H200 did with cuDNN 9.19:
480 LSTMs and GRUs of 1 to 3 layers, 128, 512 and 1,024 units, float32 and float16, one and two directions, with and
without dropout (the probe ``cudnn_rnn`` of tests/recordings, which test_lowering_cudnn_rnn_sizes.py holds them to), and
to the events of two trainings there, one of them packed. The reserve is exact; nine in ten workspaces are within 1 %,
all within 6 %. Plain nets, projections, other numbers of units and other cards are assumed to be alike, and so are the
ranges: they are not bounds.

Shapes: T steps, B samples, I input size, H hidden size, P projection size (H without one), L layers, D directions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Cell = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]

_GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_KEPT: dict[Cell, int] = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Values of H that a layer keeps for each step and sample: an LSTM the gates and the cell state."""

_SMALL = 128
"""Units of a layer up to which cuDNN takes other kernels; between these and `_LARGE` nothing was measured."""
_LARGE = 512
_PER_MATRICES_BYTES = 8 << 20
"""What each layer takes in each direction whatever its size."""
_HEADER_BYTES = 256


class SizeRange(NamedTuple):
    """Bytes: the least and the most that is plausible, and what a trace uses."""

    low: int
    likely: int
    high: int


class RnnShape(NamedTuple):
    """All that the sizes depend on."""

    cell: Cell
    num_steps: int
    batch: int
    num_inputs: int
    hidden_size: int
    num_projected: int
    num_layers: int
    bidirectional: bool
    element_bytes: int
    has_dropout: bool
    packed_rows: int | None = None

    @property
    def num_rows(self) -> int:
        """Steps of all samples; of a packed batch those that are there."""
        return self.num_steps * self.batch if self.packed_rows is None else self.packed_rows

    @property
    def num_directions(self) -> int:
        """2 for a bidirectional net."""
        return 2 if self.bidirectional else 1

    @property
    def num_outputs(self) -> int:
        """P: what one direction gives per step."""
        return self.num_projected or self.hidden_size

    @property
    def matrix_elements(self) -> int:
        """Weights without biases."""
        gates = _GATES[self.cell] * self.hidden_size
        inputs = self.num_inputs + (self.num_layers - 1) * self.num_directions * self.num_outputs
        per_direction = gates * (inputs + self.num_layers * self.num_outputs)
        return self.num_directions * (per_direction + self.num_layers * self.num_projected * self.hidden_size)

    @property
    def weight_elements(self) -> int:
        """The flat buffer: cuDNN has both biases even where the module has none (``CUDNN_RNN_DOUBLE_BIAS``)."""
        return self.matrix_elements + 2 * _GATES[self.cell] * self.hidden_size * self.num_layers * self.num_directions


def reserve_bytes(shape: RnnShape) -> SizeRange:
    """What forward leaves for backward: values of every step of every layer, the outputs between layers, a mask.

    ``es * rows * D * (k*H*L + P*(L-1))`` with k = 5 (LSTM), 6 (GRU) or 1 (plain), exact for what was measured. A
    projection adds the state before it. Of dropout D bits are kept for each value between layers, padding included.
    """
    rows = shape.num_rows * shape.num_directions
    per_value = rows * shape.hidden_size * shape.num_layers
    between = rows * shape.num_outputs * (shape.num_layers - 1)
    kept = _KEPT[shape.cell] + (1 if shape.num_projected else 0)
    mask_bits = shape.num_steps * shape.batch * shape.num_outputs * (shape.num_layers - 1) * shape.num_directions**2
    likely = shape.element_bytes * (kept * per_value + between) + _HEADER_BYTES
    likely += -(-mask_bits // 8) if shape.has_dropout else 0
    return _range(shape, likely)


def workspace_bytes(shape: RnnShape) -> SizeRange:
    """What one call of forward or backward takes and gives back.

    ``es * (matrices + rows * ((n-1)*H + I) + m*B*H) + 8 MiB * L * D``: the matrices once more, n values of H for each
    row of which one is as wide as the input, and m for each sample. Small layers take 14 to 16 more for each row.
    """
    num_rows, of_sample = _values_of_h(shape)
    rows, inputs = shape.num_rows, shape.num_steps * shape.batch * shape.num_inputs
    if shape.packed_rows is not None:  # nothing is packed and unpacked, and rows come by 32
        num_rows, rows = num_rows - 2 * shape.num_directions, -(-rows // 32) * 32
    per_row = (num_rows - 1) * rows * shape.hidden_size + inputs
    elements = shape.matrix_elements + per_row + of_sample * shape.batch * shape.hidden_size
    likely = shape.element_bytes * elements + _PER_MATRICES_BYTES * shape.num_layers * shape.num_directions
    likely += _HEADER_BYTES
    sized = _range(shape, likely)
    is_between = _SMALL < shape.hidden_size < _LARGE
    more = 16 * rows * shape.hidden_size * shape.element_bytes if is_between else 0
    return sized._replace(high=sized.high + more)


def _values_of_h(shape: RnnShape) -> tuple[int, int]:
    """How many times H a workspace has for each row and for each sample."""
    num_layers, is_small = shape.num_layers, shape.hidden_size <= _SMALL
    if shape.cell == "lstm" and shape.bidirectional:
        return (31, 18 * num_layers) if is_small else (15, 24 * num_layers)
    if shape.cell == "lstm":
        is_half_alone = shape.element_bytes == 2 and num_layers == 1
        of_dropout = int(shape.has_dropout)
        of_sample = 10 * num_layers + int(num_layers == 1)
        return (22 + of_dropout, 8 * num_layers) if is_small or is_half_alone else (6 + of_dropout, of_sample)
    if shape.bidirectional:
        per_row = 13 if num_layers == 1 else 14
        return (2 * per_row if is_small else per_row), 14 * num_layers
    if is_small:
        return (20 if num_layers == 1 else 21), 6 * num_layers
    return (6 if num_layers == 1 or shape.has_dropout else 5), 5 * num_layers


def _range(shape: RnnShape, likely: int) -> SizeRange:
    """A tenth less and more for what was measured; anything up to twice as much for what was not."""
    if shape.cell in ("lstm", "gru") and not shape.num_projected:
        return SizeRange(likely - likely // 10, likely, likely + likely // 10)
    return SizeRange(0, likely, 2 * likely)


def uncertainty_bytes(shape: RnnShape, train: bool = True) -> tuple[int, int]:
    """How much less and how much more than traced one call may take, its reserve and its workspace in all."""
    ranges = [workspace_bytes(shape), *([reserve_bytes(shape)] if train else [])]
    return sum(size.likely - size.low for size in ranges), sum(size.high - size.likely for size in ranges)
