"""Flops and bytes of ops, counted by hand. Floats are of 4 bytes, integers of 8."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.device.off_device import outside_the_device
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.trace import dry_run
from plimsoll.memory.work import NO_WORK, Work, WorkCounter, add_work, hearing
from plimsoll.planning.predict_step import predict

aten = torch.ops.aten
A = torch.zeros(3, 4)
B = torch.zeros(4, 5)
IDS = torch.tensor([0, 2])


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.work = []
        self._counter = WorkCounter(lambda tensor: False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.work.append(
            (func._schema.name.removeprefix("aten::"), self._counter.count(func, args, kwargs or {}, result))
        )
        return result


def work_of(function):
    with hearing(), Counted() as counted:
        function()
    return dict(counted.work)


@pytest.mark.parametrize(
    ("function", "name", "flops", "moved_bytes"),
    [
        (lambda: A @ B, "mm", 2 * 3 * 4 * 5, 4 * (12 + 20 + 15)),
        (lambda: torch.addmm(A, A, torch.zeros(4, 4)), "addmm", 2 * 3 * 4 * 4, 4 * (12 + 12 + 16 + 12)),
        (lambda: torch.bmm(A[None], B[None]), "bmm", 120, 4 * 47),
        (lambda: A + A, "add", 0, 4 * 36),
        (lambda: A.clone().add_(A), "add_", 0, 4 * (12 + 12 + 12)),
        (lambda: A.clone().zero_(), "zero_", 0, 4 * 12),
        (lambda: torch.zeros_like(A), "zeros_like", 0, 4 * 12),
        (lambda: torch.empty(3, 4).copy_(A), "copy_", 0, 4 * 24),
        (lambda: nn.functional.embedding(IDS, A), "embedding", 0, 2 * 4 * 8 + 8 * 2),
        (lambda: A.index_select(0, IDS), "index_select", 0, 2 * 4 * 8 + 8 * 2),
        (lambda: torch._foreach_add_([A.clone(), B.clone()], 1.0), "_foreach_add_", 0, 2 * 4 * 32),
        (lambda: torch.cat([A, A]), "cat", 0, 4 * 48),
    ],
)
def test_flops_and_bytes_of_an_op(function, name, flops, moved_bytes):
    found = work_of(function)[name]
    assert (found.flops, found.moved_bytes, found.outside_bytes) == (flops, moved_bytes, 0)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: A.view(12), "view"),
        (lambda: A.t(), "t"),
        (lambda: A.expand(2, 3, 4), "expand"),
        (lambda: A.split(2), "split"),
        (lambda: A.detach(), "detach"),
        (lambda: torch.empty(8), "empty"),
    ],
)
def test_views_and_memory_without_content_move_nothing(function, name):
    assert work_of(function)[name] is NO_WORK


def test_the_type_of_a_product_is_noted():
    assert work_of(lambda: A.bfloat16() @ B.bfloat16())["mm"] == Work(120, 2 * 47, 0, "bfloat16")


def test_attention_on_the_processor_is_two_products_and_five_for_its_gradients():
    query = torch.zeros(2, 3, 8, 16, requires_grad=True)

    def attend():
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()

    found = work_of(attend)
    product = 2 * 2 * 3 * 8 * 8 * 16
    assert found["_scaled_dot_product_flash_attention_for_cpu"].flops == 2 * product
    assert found["_scaled_dot_product_flash_attention_for_cpu_backward"].flops == 5 * product


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_with_shared_keys_is_counted_by_the_heads_of_the_query(kind):
    """torch 2.11 refuses to count attention with fewer key heads, as in every Llama, Qwen and Mistral."""
    query, key = torch.zeros(2, 4, 8, 16, device="meta"), torch.zeros(2, 2, 8, 16, device="meta")
    counter, product = WorkCounter(lambda tensor: False), 2 * 2 * 4 * 8 * 8 * 16
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward").default
    assert counter.count(forward, (query, key, key), {}, query).flops == 2 * product
    assert counter.count(backward, (query, query, key, key), {}, query).flops == 5 * product


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_a_model_with_shared_keys_can_be_predicted_for_a_gpu(num_key_heads, precision):
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=num_key_heads, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.ones(2, 8, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters())
    batch = {"input_ids": ids, "labels": ids}
    predicted = predict(model, optimizer, batch, units="next-tokens", device="h200", precision=precision)
    assert predicted.peak.traced_bytes > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
def test_a_layer_of_onednn_has_the_products_of_its_gates():
    lstm = nn.LSTM(5, 7)  # 6 steps of 2 samples, 4 gates of 7 from 5 inputs and 7 hidden values

    def train():
        lstm(torch.zeros(6, 2, 5))[0].sum().backward()

    found = work_of(train)
    assert found["mkldnn_rnn_layer"].flops == 2 * 6 * (2 + 1) * 4 * 7 * (5 + 7)
    assert found["mkldnn_rnn_layer_backward"].flops == 2 * found["mkldnn_rnn_layer"].flops


def test_what_a_lowering_says_belongs_to_one_op():
    with hearing(), Counted() as counted:
        add_work(1000, 8)
        torch.empty(3)
        torch.empty(3)
    assert [work for _, work in counted.work] == [Work(1000, 8, 0, "float32"), NO_WORK]


def test_what_is_said_outside_of_a_record_is_in_none():
    recorder = Recorder()
    add_work(1000, 8)
    with recorder:
        torch.empty(3)
        add_work(2000, 8)  # of an op that does not come
    with Counted() as behind:
        torch.empty(3)
    assert recorder.trace("measured", "cpu").ops.flops == (0,)
    assert [work for _, work in behind.work] == [NO_WORK]


def test_cudnns_layer_has_the_products_of_all_its_weights_three_times():
    with dry_run(CudaLowering((8, 6))) as place:
        place.recorder.step = 1
        lstm = nn.LSTM(5, 7).to("cuda")
        lstm(torch.zeros(6, 2, 5, device="cuda", requires_grad=True))[0].sum().backward()
        ops = place.trace().ops
    num_weights = 4 * 7 * (5 + 7) + 2 * 4 * 7
    noted = [row for row, flops in enumerate(ops.flops) if flops]
    assert [ops.flops[row] for row in noted] == [2 * 6 * 2 * num_weights] * 3
    assert all(ops.moved_bytes[row] >= 6 * num_weights * 4 for row in noted)


def test_a_recorder_notes_work_and_what_is_outside():
    with Recorder() as recorder:
        recorder.step = 1
        with outside_the_device():
            there = torch.empty(10)
        here = torch.ones(10)
        there.copy_(here)
    ops = recorder.trace("measured", "cpu").ops
    assert (ops.moved_bytes[-1], ops.outside_bytes[-1]) == (40, 40)
    assert {len(column) for column in (ops.flops, ops.moved_bytes, ops.outside_bytes, ops.dtype)} == {len(ops.name)}
