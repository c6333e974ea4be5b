"""Estimated sizes of cuDNN's buffers for recurrent layers: the reserve for backward, and the workspace of one call.

cuDNN returns the sizes only at run time (``cudnnGetRNNTempSpaceSizes``, in ``get_num_weights`` and ``_cudnn_rnn`` of
aten/src/ATen/native/cudnn/RNN.cpp) and documents no formula. The formulas here are fitted to measurements on an H200
with cuDNN 9.19: 480 LSTMs and GRUs of 1 to 3 layers. They have 128, 512 and 1,024 units, float32 and float16, one and
two directions, with and without dropout. The measurements are the probe ``cudnn_rnn`` in tests/recordings, against
which test_lowering_cudnn_rnn_sizes.py checks the formulas. Events of two training runs were used, too, one of them with
packed sequences. The reserve is exact. Nine in ten workspaces are within 1 %, all within 6 %. Plain nets, projections,
other numbers of units and other cards are assumed to behave alike. The ranges are assumptions as well, not bounds.

Shapes: T steps, B samples, I input size, H hidden size, P projection size (H without one), L layers, D directions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Cell = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]

_GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_KEPT: dict[Cell, int] = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Values per hidden unit that a layer keeps for each step and sample. An LSTM keeps the gates and the cell state."""

_SMALL = 128
"""Largest measured hidden size of cuDNN's kernels for small layers. Sizes between this and `_LARGE` are unmeasured."""
_LARGE = 512
_PER_MATRICES_BYTES = 8 << 20
"""Bytes for each layer and direction, regardless of its size."""
_HEADER_BYTES = 256


class SizeRange(NamedTuple):
    """Lowest and highest plausible size in bytes, and the likely size that a trace uses."""

    low: int
    likely: int
    high: int


class RnnShape(NamedTuple):
    """The parameters of a recurrent layer and its batch, on which the sizes of cuDNN's buffers depend.

    ``num_projected`` is the projection size, 0 without a projection. ``packed_rows`` is the number of time steps of all
    samples in a packed batch; ``None`` for a batch that is not packed.
    """

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
        """Number of time steps of all samples together, without padding if the batch is packed."""
        return self.num_steps * self.batch if self.packed_rows is None else self.packed_rows

    @property
    def num_directions(self) -> int:
        """2 for a bidirectional net, otherwise 1."""
        return 2 if self.bidirectional else 1

    @property
    def num_outputs(self) -> int:
        """P: output size of one direction per step."""
        return self.num_projected or self.hidden_size

    @property
    def matrix_elements(self) -> int:
        """Number of weights without biases."""
        gates = _GATES[self.cell] * self.hidden_size
        inputs = self.num_inputs + (self.num_layers - 1) * self.num_directions * self.num_outputs
        per_direction = gates * (inputs + self.num_layers * self.num_outputs)
        return self.num_directions * (per_direction + self.num_layers * self.num_projected * self.hidden_size)

    @property
    def weight_elements(self) -> int:
        """Number of elements of cuDNN's weight buffer, which always has both biases (``CUDNN_RNN_DOUBLE_BIAS``)."""
        return self.matrix_elements + 2 * _GATES[self.cell] * self.hidden_size * self.num_layers * self.num_directions


def reserve_bytes(shape: RnnShape) -> SizeRange:
    """Return the size of the reserve that forward keeps for backward.

    It contains k values per unit for every step and layer, the outputs between layers, and a dropout mask. ``es * rows
    * D * (k*H*L + P*(L-1))`` with k = 5 (LSTM), 6 (GRU) or 1 (plain) is exact for all measurements. ``es`` is the bytes
    of an element. A projection adds 1 to k, for the state before it. Dropout adds D bits for each value between layers,
    padding included.
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
    """Return the size of the workspace of one forward or backward call.

    ``es * (matrices + rows * ((n-1)*H + I) + m*B*H) + 8 MiB * L * D``

    ``es``: bytes of an element. ``matrices``: number of weights without biases. ``rows``: time steps of all samples
    together (`RnnShape.num_rows`).

    n: vectors for each row, one of width I and the others of width H. m: vectors of width H for each sample. Both are
    from `_values_of_h`. For small layers (`_SMALL`), n is larger by 13 to 16 than for large layers.
    """
    num_rows, of_sample = _values_of_h(shape)
    rows, inputs = shape.num_rows, shape.num_steps * shape.batch * shape.num_inputs
    if shape.packed_rows is not None:  # nothing is packed or unpacked, and rows are rounded up to 32
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
    """Return n and m of `workspace_bytes`: the numbers of vectors in a workspace for each row and for each sample."""
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
    """Return a range of 10 % around a measured size, and from 0 to twice the size for unmeasured shapes."""
    if shape.cell in ("lstm", "gru") and not shape.num_projected:
        return SizeRange(likely - likely // 10, likely, likely + likely // 10)
    return SizeRange(0, likely, 2 * likely)


def uncertainty_bytes(shape: RnnShape, train: bool = True) -> tuple[int, int]:
    """Return the bytes by which the reserve and workspace of one call may be smaller, and larger, than in the trace."""
    ranges = [workspace_bytes(shape), *([reserve_bytes(shape)] if train else [])]
    return sum(size.likely - size.low for size in ranges), sum(size.high - size.likely for size in ranges)
