"""What cuDNN's recurrent kernels take beside the tensors: the reserve kept for backward, the workspace of one call.

What is known of the sizes is little, since cuDNN tells them only at run time (``cudnnGetRNNTempSpaceSizes``). The one
public measurement found (pytorch#2895, P100, cuDNN of 2017) gives the bytes of an LSTM and a GRU, but its script could
not be read, so the shape is inferred: the three parameter counts fit 4 layers of 320 units on 123 features and a linear
layer to 10. In units of 320 floats the reserves are then 23 and 27 times 25,000 rows (or a part of that and so many
times more), which reads as 4 layers x (5 or 6) + 3 outputs between; the workspaces less the matrices are 4 layers x
(11 and 8) x 100, which reads as 100 samples, hence 250 steps. So the formulas are *fitted to two points of one inferred
shape*. Everything else (projection, dropout, half, plain RNN, inference, cuDNN 9) is assumed, and so are the ranges:
they are not bounds.

It does NOT cover the switch to other algorithms (small hidden sizes, persistent kernels for half precision).

Shapes: T steps, B samples, I input size, H hidden size, P projection size (H without one), L layers, D directions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Cell = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]

_GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_STATES: dict[Cell, int] = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
# Values of H a layer keeps for each step and sample: (the least mathematics needs, measured or likely, MIOpen's).
_KEPT: dict[Cell, tuple[int, int, int]] = {
    "lstm": (5, 5, 7),  # 4 gates and the cell state
    "gru": (4, 6, 8),  # 3 gates and the hidden part of the third; 6 is what was measured
    "rnn_tanh": (0, 1, 2),  # the output is enough
    "rnn_relu": (0, 1, 2),
}


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
    """What forward leaves for backward: the gates of every step of every layer, and the outputs between layers.

    likely: T*B*D*(k*H*L + P*(L-1)) elements with k = 5 (LSTM: 4 gates, cell state), 6 (GRU) or 1 (RNN). k = 5 and 6
    are exact for pytorch#2895 (736,000,000 and 864,000,000 B); k = 1 is inferred from the totals of nvidia-smi there
    (RNN 1,020 MiB below LSTM with two reserves alive: leaves 44 MiB to explain, the next whole number 288). The last
    layer's output is ``y`` and not kept again. A projection adds the state before it (needed for the gradient of its
    matrix); dropout adds, as in MIOpen, the dropped output between layers and one byte of mask.
    low: the least that backward needs without computing forward again, one bit of mask.
    high: k as in MIOpen (LSTM 7, GRU 8, RNN 2), and for 2-byte types one state per layer in float32.

    The docs have the size depend on the longest length and the batch, so a packed batch is counted as if padded.
    """
    rows = shape.num_steps * shape.batch * shape.num_directions
    per_value = rows * shape.hidden_size * shape.num_layers
    between = rows * shape.num_outputs * (shape.num_layers - 1)
    least, usual, most = (count * per_value * shape.element_bytes for count in _KEPT[shape.cell])
    projected = per_value * shape.element_bytes if shape.num_projected else 0
    passed_on = between * shape.element_bytes
    dropped = between * (shape.element_bytes + 1) if shape.has_dropout else 0
    low = least + (0 if shape.cell == "lstm" else passed_on) + (between // 8 if shape.has_dropout else 0)
    in_float32 = 2 * per_value if shape.element_bytes == 2 else 0
    return SizeRange(low, usual + projected + passed_on + dropped, most + projected + passed_on + dropped + in_float32)


def workspace_bytes(shape: RnnShape) -> SizeRange:
    """What one call of forward or backward takes and gives back.

    likely: the matrices once more (transposed for the GEMMs) and, per layer, direction and sample, both gate sums of
    one step and its states and one more: es * (matrices + L*D*B*H*(2*gates + states + 1)). Exact for pytorch#2895
    (17,730,560 B LSTM, 13,169,920 B GRU) with 100 samples. Assumed the
    same for inference and for the two backward calls.
    low: nothing. high: besides, the gates of one layer for all steps (one GEMM over time), a packed copy of input
    and output, and for 2-byte types the weight gradients in float32.
    """
    gates, num_directions = _GATES[shape.cell], shape.num_directions
    per_step = (
        (2 * gates + _STATES[shape.cell] + 1) * shape.num_layers * num_directions * shape.batch * shape.hidden_size
    )
    likely = shape.element_bytes * (shape.matrix_elements + per_step)
    all_steps = num_directions * (gates * shape.hidden_size + shape.num_outputs) + shape.num_inputs
    high = likely + shape.element_bytes * shape.num_steps * shape.batch * all_steps
    if shape.element_bytes == 2:
        high += 4 * shape.weight_elements
    return SizeRange(0, likely, high)


def uncertainty_bytes(shape: RnnShape, train: bool = True) -> tuple[int, int]:
    """How much less and how much more than traced one call may take, its reserve and its workspace together."""
    ranges = [workspace_bytes(shape), *([reserve_bytes(shape)] if train else [])]
    return sum(size.likely - size.low for size in ranges), sum(size.high - size.likely for size in ranges)
