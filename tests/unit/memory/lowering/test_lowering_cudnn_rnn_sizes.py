"""The sizes of cuDNN's buffers: measured on an H200 for 480 shapes and in two trainings, and predicted ranges."""

import gzip
import itertools
import json
import statistics
from pathlib import Path
from typing import get_args

import pytest

from plimsoll.memory.lowering.cudnn_rnn_sizes import Cell, RnnShape, reserve_bytes, uncertainty_bytes, workspace_bytes

RECORDED = Path(__file__).parents[3] / "recordings" / "nvidia-h200-torch2.11.0.json.gz"


def shape(cell: Cell, **changes) -> RnnShape:
    usual = RnnShape(cell, 250, 100, 123, 320, 0, 4, bidirectional=False, element_bytes=4, has_dropout=False)
    return usual._replace(**changes)


def recorded_shapes() -> list[tuple[RnnShape, dict]]:
    runs = json.loads(gzip.decompress(RECORDED.read_bytes()))["runs"]
    rows = next(run["rows"] for run in runs if run["id"] == "probe:cudnn_rnn")
    return [
        (
            RnnShape(
                row["cell"], row["length"], row["batch"], row["hidden"], row["hidden"], 0, row["layers"],
                row["bidirectional"], 4 if row["dtype"] == "float32" else 2, row["dropout"] > 0,
            ),
            row,
        )
        for row in rows
    ]  # fmt: skip


def test_every_recorded_reserve_is_exact_and_workspaces_are_near():
    """A measured peak may include other memory, so the nearer of two measurements counts. The worst error is 6 %."""
    shapes = recorded_shapes()
    assert len(shapes) == 480
    assert all(reserve_bytes(one).likely == row["reserve_bytes"] for one, row in shapes)
    errors = []
    for one, row in shapes:
        forward, alone = row["forward"], row["without_grad"]
        measured = (
            forward["peak_bytes"] - forward["kept_bytes"],
            alone["peak_bytes"] - row["outputs_bytes"] - row["reserve_bytes"],
        )
        workspace = workspace_bytes(one)
        errors.append(min(abs(workspace.likely / size - 1) for size in measured))
        assert any(workspace.low <= size <= workspace.high for size in measured), one
    assert statistics.median(errors) < 0.001
    assert statistics.quantiles(errors, n=10)[-1] < 0.01
    assert max(errors) < 0.06


def test_two_recorded_trainings_have_these_buffers():
    """One is a GRU over packed texts, 8,030 tokens in 64 x 200; the other is an LSTM with inputs of half its width."""
    packed = RnnShape("gru", 200, 64, 300, 512, 0, 2, True, 4, has_dropout=True, packed_rows=8030)
    assert reserve_bytes(packed).likely == 430_858_496
    assert workspace_bytes(packed).likely == pytest.approx(229_482_752, abs=512)
    lstm = RnnShape("lstm", 64, 32, 512, 1024, 0, 2, False, 4, has_dropout=True)
    assert reserve_bytes(lstm).likely == pytest.approx(92_537_088, abs=512)
    assert workspace_bytes(lstm).likely == pytest.approx(132_645_376, abs=512)


def test_the_plain_net_has_the_parameters_of_the_measurement_too():
    assert shape("rnn_tanh").weight_elements + 3210 == 761_930


def test_a_bidirectional_layer_reads_both_directions_of_the_one_below():
    # LSTM, I 3, H 2, 2 layers, both directions: 8 x 3 + 8 x 2 below, 8 x 4 + 8 x 2 above, and 2 x 8 biases for each.
    small = shape("lstm", num_inputs=3, hidden_size=2, num_layers=2, bidirectional=True)
    assert small.matrix_elements == 2 * (24 + 16 + 32 + 16)
    assert small.weight_elements == small.matrix_elements + 4 * 16
    # With a projection to 1: 8 x 3 + 8 x 1 and 1 x 2 below, 8 x 2 + 8 x 1 and 1 x 2 above.
    assert small._replace(num_projected=1).matrix_elements == 2 * (24 + 8 + 2 + 16 + 8 + 2)


def test_dropout_keeps_a_bit_for_each_value_and_direction():
    # 3 outputs between 4 layers, of 250 x 100 x 320 values.
    kept = reserve_bytes(shape("gru", has_dropout=True)).likely - reserve_bytes(shape("gru")).likely
    assert kept == 3 * 250 * 100 * 320 // 8
    both = [reserve_bytes(shape("gru", bidirectional=True, has_dropout=one)).likely for one in (True, False)]
    assert both[0] - both[1] == 4 * kept


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
    below, above = workspace.likely - workspace.low, workspace.high - workspace.likely
    assert uncertainty_bytes(lstm, train=False) == (below, above)
    less, more = uncertainty_bytes(lstm)
    assert less == below + reserve.likely - reserve.low
    assert more == above + reserve.high - reserve.likely
