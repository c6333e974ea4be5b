"""The predicted scratch memory of an op equals the memory that the kernel counts around it."""

import json
import platform

import pytest
import torch

from plimsoll.memory.lowering.cpu_scratch import KEPT_BYTES, kept_by_libraries, scratch_bytes
from processes import run_program

pytestmark = pytest.mark.cold  # libraries keep memory from their first use on

MIB = 1 << 20

# Every op runs once before, so that libraries have allocated the memory that they keep.
_MEASURE = """
import json, torch
from plimsoll.device import process
from plimsoll.device.cpu import heap
from plimsoll.memory.lowering.cpu_scratch import scratch_bytes
from plimsoll.memory.lowering.mkldnn_rnn import unwritten_workspace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.nn import functional

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        peak = process.PeakCounter()
        before = process.private_bytes()
        peak.reset()
        out = func(*args, **(kwargs or {}))
        after = process.private_bytes()
        said, workspace = scratch_bytes(str(func), args, kwargs), 0
        if "mkldnn_rnn_layer.default" in str(func):
            workspace = out[3].nbytes - unwritten_workspace(args, out)[1]
        results = [t for t in (out if isinstance(out, tuple) else [out]) if isinstance(t, torch.Tensor)]
        results = results[:-1] if workspace else results
        grown = sum(t.untyped_storage().nbytes() for t in results)
        if said:
            taken = peak.read(after) - before - grown - workspace
            found.append((str(func), said, taken, workspace, after - before - grown))
        return out

torch.set_num_threads(1)
heap.map_blocks_from(heap.TIGHT_BYTES)
tensor = lambda *shape: torch.randn(*shape, requires_grad=True)
lstm, half = torch.nn.LSTM(256, 512), torch.nn.LSTM(256, 512, dtype=torch.bfloat16)
is_half_onednns = torch.ops.mkldnn._is_mkldnn_bf16_supported()
both_ways, wide = torch.nn.LSTM(256, 256, bidirectional=True), torch.nn.LSTM(512, 256, bidirectional=True)
heads = [tensor(8, 4, 1024, 64) for _ in range(3)]
convolution = torch.nn.Conv1d(128, 256, 3, padding=1)
table = torch.nn.Embedding(4000, 512)
cases = [
    lambda x=tensor(96, 16, 256), g=torch.ones(96, 16, 512): lstm(x)[0].backward(g),
    lambda g=torch.ones(8, 4, 1024, 64): functional.scaled_dot_product_attention(*heads).backward(g),
    lambda g=torch.ones(8, 4, 1024, 64): functional.scaled_dot_product_attention(*heads, dropout_p=0.1).backward(g),
    lambda x=tensor(16, 128, 512), g=torch.ones(16, 256, 512): convolution(x).backward(g),
    lambda ids=torch.randint(0, 4000, (4096,)): table(ids).sum().backward(),
    lambda x=tensor(96, 32, 256), g=torch.ones(96, 32, 512): both_ways(x)[0].backward(g),
    lambda x=tensor(96, 32, 512), g=torch.ones(96, 32, 512): wide(x)[0].backward(g),
    *[lambda x=tensor(96, 32, 256).detach().bfloat16().requires_grad_(): half(x)[0].sum().backward()] * is_half_onednns,
]
for case in cases:
    case()
    turns = []
    for turn in range(3):  # of which the middle one counts: a page that was freed just then is no scratch
        found = []
        with Watch():
            case()
        turns.append(found)
    for op in zip(*turns):
        print(json.dumps(sorted(op, key=lambda one: one[2])[1]))
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed goes back at once only with glibc")
def test_what_is_said_is_what_the_kernel_counts():
    done = run_program(_MEASURE)
    assert done.returncode == 0, done.stderr
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    for name, said_bytes, scratch, said_workspace_bytes, workspace in found:
        print(f"{name:60} {said_bytes / MIB:6.2f} {scratch / MIB:6.2f}  {said_workspace_bytes} {workspace}")
    assert {name.split(".")[1] for name, *_ in found} == {
        "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_safe_softmax", "convolution", "convolution_backward",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
        "embedding_dense_backward",
    }  # fmt: skip
    for name, said_bytes, scratch, said_workspace_bytes, workspace in found:
        if said_bytes < MIB:
            continue  # it may come of chunks that the heap has free, and then nothing grows
        assert abs(scratch - said_bytes) <= 0.1 * said_bytes + MIB / 2, name
        if said_workspace_bytes:
            assert abs(workspace - said_workspace_bytes) <= 0.02 * said_workspace_bytes + MIB / 2, name


def test_an_op_that_takes_nothing_says_so_and_fake_tensors_will_do():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        batch = torch.empty(16, 128, 512)
        assert scratch_bytes("aten.mm.default", (batch[0], batch[0].t())) == 0
        assert scratch_bytes("aten._safe_softmax.default", (batch, -1)) == 16 * 128 * 512
        assert scratch_bytes("aten.embedding_dense_backward.default", (batch,)) == 0
        assert scratch_bytes("aten.embedding_dense_backward.default", (batch.transpose(0, 1),)) == 4 * MIB
        weights = torch.empty(256, 128, 3), torch.empty(256)
        folded = (batch, *weights, [2], [1], [1], False, [0], 1)
        assert scratch_bytes("aten.convolution.default", folded) == 4 * MIB  # the input: half the pixels come out


def test_what_matrix_products_keep_grows_with_the_threads_and_what_recurrent_nets_keep_does_not():
    one, two = kept_by_libraries([], 1), kept_by_libraries([], 2)
    assert two.likely_bytes == two.modelled_bytes == 2 * one.likely_bytes == 2 * KEPT_BYTES["matmul"].bytes
    recurrent = kept_by_libraries(["aten.mkldnn_rnn_layer.default"], 2)
    assert recurrent.likely_bytes - two.likely_bytes == KEPT_BYTES["recurrent"].bytes
    assert recurrent.low_bytes < recurrent.likely_bytes < recurrent.high_bytes
    for kept in KEPT_BYTES.values():
        assert kept.least_bytes <= kept.bytes <= kept.most_bytes
