"""The sizes of cuDNN's buffers: the one public measurement, and ranges that hold their likely value."""

import itertools
from typing import get_args

import pytest

from plimsoll.memory.lowering.cudnn_rnn_sizes import Cell, RnnShape, reserve_bytes, uncertainty_bytes, workspace_bytes

# pytorch#2895; the shape is inferred from these numbers: 4 layers of 320 units on 123 features, 100 samples of 250
# steps, float32, and a linear layer to 10.
MEASURED = [("lstm", 736_000_000, 17_730_560, 3_038_090), ("gru", 864_000_000, 13_169_920, 2_279_370)]


def shape(cell: Cell, **changes) -> RnnShape:
    usual = RnnShape(cell, 250, 100, 123, 320, 0, 4, bidirectional=False, element_bytes=4, has_dropout=False)
    return usual._replace(**changes)


@pytest.mark.parametrize(("cell", "reserve", "workspace", "parameters"), MEASURED)
def test_the_public_measurement_is_reproduced_to_the_byte(cell: Cell, reserve, workspace, parameters):
    assert reserve_bytes(shape(cell)).likely == reserve
    assert workspace_bytes(shape(cell)).likely == workspace
    assert shape(cell).weight_elements + 320 * 10 + 10 == parameters


def test_the_plain_net_has_the_parameters_of_the_measurement_too():
    assert shape("rnn_tanh").weight_elements + 3210 == 761_930


def test_a_bidirectional_layer_reads_both_directions_of_the_one_below():
    # LSTM, I 3, H 2, 2 layers, both directions: 8 x 3 + 8 x 2 below, 8 x 4 + 8 x 2 above, and 2 x 8 biases for each.
    small = shape("lstm", num_inputs=3, hidden_size=2, num_layers=2, bidirectional=True)
    assert small.matrix_elements == 2 * (24 + 16 + 32 + 16)
    assert small.weight_elements == small.matrix_elements + 4 * 16
    # With a projection to 1: 8 x 3 + 8 x 1 and 1 x 2 below, 8 x 2 + 8 x 1 and 1 x 2 above.
    assert small._replace(num_projected=1).matrix_elements == 2 * (24 + 8 + 2 + 16 + 8 + 2)


def test_dropout_keeps_the_dropped_output_and_a_mask():
    # 3 outputs between 4 layers, of 250 x 100 x 320 values: 4 bytes and 1 byte for each value.
    kept = reserve_bytes(shape("gru", has_dropout=True)).likely - reserve_bytes(shape("gru")).likely
    assert kept == 3 * 250 * 100 * 320 * 5


@pytest.mark.parametrize("cell", get_args(Cell))
def test_the_likely_size_lies_in_its_range(cell: Cell):
    grid = itertools.product((1, 3), (False, True), (2, 4), (False, True), (0, 7))
    for layers, both, element_bytes, dropout, proj in grid:
        changed = shape(
            cell,
            num_layers=layers,
            bidirectional=both,
            element_bytes=element_bytes,
            has_dropout=dropout,
            num_projected=proj,
        )
        for size in (reserve_bytes(changed), workspace_bytes(changed)):
            assert 0 <= size.low <= size.likely <= size.high


def test_uncertainty_is_of_both_buffers_in_training_and_of_the_workspace_otherwise():
    lstm = shape("lstm")
    reserve, workspace = reserve_bytes(lstm), workspace_bytes(lstm)
    assert uncertainty_bytes(lstm, train=False) == (workspace.likely, workspace.high - workspace.likely)
    less, more = uncertainty_bytes(lstm)
    assert less == workspace.likely + reserve.likely - reserve.low
    assert more == workspace.high - workspace.likely + reserve.high - reserve.likely
