"""cuBLAS's buffers in the sequence of allocations, and communication in a trace whose ops are named by hand."""

import torch
from torch import nn

from hand_traces import trace_of
from plimsoll.memory.library_buffers import LT_BYTES, deltas_with_workspaces, exchange_of, kept_by_exchanges
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import trace_training

WORKSPACE_BYTES = 8_519_680


def traced():
    def train(place):
        model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 5))
        model.to("cuda")
        model(place.fake_batch(torch.randn(7, 10)).to("cuda")).sum().backward()

    return trace_training(train, CudaLowering((8, 6)))


def added(trace, **options):
    """Return the events that are not in the trace, each with the number of trace events before it."""
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
    """Events of torch 2.11 show that only the first such layer allocates it."""
    assert [num_bytes for _, _, num_bytes in added(traced(), workspace_bytes=0)] == [LT_BYTES]


def test_up_to_torch_2_6_each_such_layer_borrows_it():
    deltas = added(traced(), workspace_bytes=0, returns_lt=True)

    assert [num_bytes for _, _, num_bytes in deltas] == [LT_BYTES, -LT_BYTES] * 2
    assert deltas[0][:2] == deltas[1][:2]


MIB = 1 << 20
NAMES = {1: "c10d._allgather_base_", 2: "c10d._allgather_base_", 3: "c10d._reduce_scatter_base_", 4: "c10d.allreduce_"}


def exchanging(names=NAMES):
    work = {0: {"moved_bytes": 99 * MIB}, 1: {"moved_bytes": 3 * MIB}, 2: {"moved_bytes": 5 * MIB}}
    work |= {3: {"moved_bytes": 5 * MIB}, 4: {"moved_bytes": 8}}
    phases = ("forward", "forward", "backward", "backward", "backward")
    trace = trace_of(*((phase, 1 + (number > 0), "") for number, phase in enumerate(phases)), work=work)
    renamed = {f"aten.op{number}.default": f"{name}.default" for number, name in names.items()}
    return trace.model_copy(update={"texts": tuple(renamed.get(text, text) for text in trace.texts)})


def test_the_last_step_is_added_up_and_what_only_says_how_it_went_is_left_out():
    trace = exchanging({0: "c10d.allreduce_"} | NAMES)
    kept = kept_by_exchanges(trace, "cpu")
    exchange = exchange_of(trace, 4, kept)
    assert (exchange.num_ranks, exchange.kept) == (4, kept)
    assert (exchange.gathered_bytes, exchange.largest_gathered_bytes) == (8 * MIB, 5 * MIB)
    assert (exchange.scattered_bytes, exchange.largest_scattered_bytes) == (5 * MIB, 5 * MIB)
    assert (exchange.added_up_bytes, exchange.largest_added_up_bytes) == (0, 0)


def test_what_is_kept_is_modelled_of_gloo_and_assumed_of_nccl():
    trace = exchanging()
    gloo, nccl = kept_by_exchanges(trace, "cpu"), kept_by_exchanges(trace, "cuda")
    assert gloo.modelled_bytes == gloo.likely_bytes > 0
    assert nccl.assumed_bytes == nccl.likely_bytes > gloo.likely_bytes


def test_a_training_of_one_process_exchanges_nothing():
    assert kept_by_exchanges(exchanging({}), "cpu") is None
