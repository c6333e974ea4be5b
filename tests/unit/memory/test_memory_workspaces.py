"""cuBLAS's buffers in the sequence of allocations."""

import torch
from torch import nn

from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import trace_training
from plimsoll.memory.workspaces import LT_BYTES, deltas_with_workspaces

WORKSPACE_BYTES = 8_519_680


def traced():
    def train(place):
        model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 5))
        model.to("cuda")
        model(place.fake_batch(torch.randn(7, 10)).to("cuda")).sum().backward()

    return trace_training(train, CudaLowering((8, 6)))


def added(trace, **options):
    """What is not in the trace, with the number of the trace's own events before it."""
    own = [(storage, num_bytes) for _, storage, num_bytes in trace.deltas()]
    found, seen = [], 0
    for delta in deltas_with_workspaces(trace, **options):
        if seen < len(own) and delta == own[seen]:
            seen += 1
        else:
            found.append((seen, *delta))
    assert seen == len(own)
    return found


def test_forward_and_backward_each_get_a_workspace_that_stays_behind_their_first_product():
    trace = traced()
    first_result = [num_bytes for _, _, num_bytes in trace.deltas()].index(7 * 30 * 4)

    deltas = added(trace, workspace_bytes=WORKSPACE_BYTES, lt_bytes=0)
    (at, forward, forward_bytes), (_, backward, backward_bytes) = deltas

    assert at == first_result + 1
    assert forward != backward
    assert forward_bytes == backward_bytes == WORKSPACE_BYTES


def test_one_thread_has_one_workspace():
    assert len(added(traced(), workspace_bytes=WORKSPACE_BYTES, lt_bytes=0, num_threads=1)) == 1


def test_a_layer_with_a_bias_keeps_cublaslt_s_workspace():
    """As events of torch 2.11 show: the first such layer takes it, and those after it do not."""
    assert [num_bytes for _, _, num_bytes in added(traced(), workspace_bytes=0)] == [LT_BYTES]


def test_up_to_torch_2_6_each_such_layer_borrows_it():
    deltas = added(traced(), workspace_bytes=0, returns_lt=True)

    assert [num_bytes for _, _, num_bytes in deltas] == [LT_BYTES, -LT_BYTES] * 2
    assert deltas[0][:2] == deltas[1][:2]
