"""Scratch memory of CUDA kernels, in addition to results, against the events and probes of `tests/recordings`."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from plimsoll.memory.lowering.base import NO_SCRATCH
from plimsoll.memory.lowering.cuda_scratch import scratch_bytes

aten = torch.ops.aten
RECORDING = Path(__file__).parents[3] / "recordings" / "nvidia-h200-torch2.11.0.json.gz"
H200 = (9, 0), 132


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_the_gradient_of_an_embedding_sorts_many_indices_and_sums_ten_rows_each():
    def scratch(grad, count):
        return scratch_bytes(aten.embedding_dense_backward.default, (grad, empty(count, dtype=torch.int64), 100), *H200)

    assert scratch(empty(3072, 4), 3072) == NO_SCRATCH
    assert scratch(empty(6, 512, 4).transpose(0, 1), 3072).before == (3072 * 4 * 4,)  # copied first
    before, after = scratch(empty(4000, 4, dtype=torch.bfloat16), 4000)
    assert before == (32_000, 32_000)
    assert after == (32_000, 800, 800, 8 * 500, 500 * 4 * 4)  # sums in float32


def probed():
    rows = next(run["rows"] for run in json.loads(gzip.decompress(RECORDING.read_bytes()))["runs"]
                if run["id"] == "probe:kernels")  # fmt: skip
    return [row for row in rows if row["kernel"] in ("embedding_dense_backward", "sum of rows")]


@pytest.mark.parametrize("row", probed(), ids=lambda row: f"{row['kernel']} {row['rows']} {row['dtype']}")
def test_it_is_what_the_probes_of_an_h200_show(row):
    """The tolerance is 2 MiB: torch's sort needs some, and large blocks are rounded up by up to 1 MiB."""
    grad = empty(row["rows"], 768, dtype=getattr(torch, row["dtype"]))
    if row["kernel"] == "sum of rows":
        scratch = scratch_bytes(aten.sum.dim_IntList, (grad, [0]), *H200)
    else:
        indices = empty(row["rows"], dtype=torch.int64)
        scratch = scratch_bytes(aten.embedding_dense_backward.default, (grad, indices, 30_000), *H200)
    assert sum(scratch.before + scratch.after) == pytest.approx(row["peak_bytes"] - row["kept_bytes"], abs=2 << 20)


def test_softmax_multiplies_gradient_and_output():
    scores = empty(2, 8, 8)
    assert scratch_bytes(aten._softmax_backward_data.default, (scores, scores, -1, scores.dtype), *H200).after == (512,)


@pytest.mark.parametrize(("num_rows", "num_sums"), [(65_536, 0), (65_568, 2049), (2_000_000, 16_384)])
def test_layer_norm_sums_in_parts_where_rows_are_many(num_rows, num_sums):
    rows, weight = empty(num_rows, 64), empty(64)
    args = (rows, rows, [64], empty(num_rows), empty(num_rows), weight, weight)
    found = scratch_bytes(aten.native_layer_norm_backward.default, args, (8, 0), 108)
    assert found.after == (num_sums * 64 * 4,) * (2 if num_sums else 0)
