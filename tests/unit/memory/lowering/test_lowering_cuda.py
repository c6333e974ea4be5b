"""CUDA as a target: the ops and bytes that replace the ops of a CPU trace."""

import pytest
import torch
from torch import nn

from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import dry_run, trace_training
from plimsoll.records.trace import Trace


def cuda() -> CudaLowering:
    return CudaLowering((8, 6))


def names_of(trace: Trace) -> list[str]:
    return [trace.texts[name].removeprefix("aten.").split(".")[0] for name in trace.ops.name]


def shapes_of(trace: Trace) -> list[str]:
    return [trace.texts[shape] for shape in trace.storages.shape]


def test_its_name_says_the_architecture():
    lowering = cuda()
    assert (lowering.name, lowering.kind, lowering.device) == ("cuda 8.6", "cuda", "cuda")


@pytest.mark.parametrize("dropout", [nn.Dropout(0.1), lambda x: nn.functional.dropout(x, 0.1)])
def test_dropout_keeps_a_mask_of_one_byte_for_each_number(dropout):
    def step(place):
        x = torch.randn(10, 10, device="cuda", requires_grad=True)
        dropout(x * 1).sum().backward()

    on_cuda = trace_training(step, cuda())
    assert "native_dropout" in names_of(on_cuda)
    assert "native_dropout_backward" in names_of(on_cuda)
    assert "bernoulli_" not in names_of(on_cuda)
    masks = [row for row, shape in enumerate(shapes_of(on_cuda)) if shape == "bool[10, 10]"]
    assert [on_cuda.storages.num_bytes[row] for row in masks] == [100]
    assert on_cuda.storages.category[masks[0]] == "activations"


def test_dropout_that_drops_nothing_takes_nothing():
    def step(place):
        x = torch.randn(10, 10, device="cuda")
        assert nn.functional.dropout(x, 0.0) is not None
        nn.Dropout(0.5).eval()(x)

    assert live_bytes(trace_training(step, cuda())).total.max() == 400


def test_on_the_cpu_the_mask_is_of_the_type_of_the_input():
    def step(place):
        nn.Dropout(0.1)(torch.randn(10, 10, requires_grad=True) * 1).sum().backward()

    trace = trace_training(step, CpuLowering())
    assert "native_dropout" not in names_of(trace)
    assert "bool[10, 10]" not in shapes_of(trace)


def test_attention_takes_a_kernel_of_cuda():
    def step(place):
        x = torch.randn(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()

    names = names_of(trace_training(step, cuda()))
    assert "_scaled_dot_product_flash_attention" in names
    assert "_scaled_dot_product_flash_attention_for_cpu" not in names


def test_an_lstm_is_one_call_of_cudnn_over_weights_in_one_buffer():
    with dry_run(cuda()) as place:
        place.recorder.step = 1
        model = place.fake_model(nn.LSTM(4, 8)).to("cuda")
        output, _ = model(torch.randn(5, 3, 4, device="cuda"))
        assert output.shape == (5, 3, 8)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        assert len(weights) == 1
        assert next(iter(model.parameters())).untyped_storage().nbytes() == 4 * 4 * 8 * (4 + 8 + 2)
    trace = place.trace()
    assert "sigmoid" not in names_of(trace)
    assert any("cuDNN" in assumption.text for assumption in trace.assumptions)


def test_optimizers_take_foreach():
    def step(place):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    names = names_of(trace_training(step, cuda()))
    assert {"_foreach_norm", "_foreach_addcdiv_", "_foreach_lerp_"} <= set(names)
    assert "addcdiv_" not in names


def test_autocast_casts_by_cudas_lists():
    def step(place):
        layer = nn.LayerNorm(4).to("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            x = nn.Linear(4, 4).to("cuda")(torch.randn(2, 4, device="cuda"))
            assert x.dtype is torch.float16
            assert layer(x).dtype is torch.float32  # in lower precision on the CPU
            assert torch.softmax(x, 1).dtype is torch.float32

    trace_training(step, cuda())


def test_dropout_allocates_its_mask_before_its_result():
    def step(place):
        nn.functional.dropout(torch.zeros(8, 16, device="cuda"))

    trace = trace_training(step, cuda())
    assert shapes_of(trace)[-2:] == ["bool[8, 16]", "float32[8, 16]"]
