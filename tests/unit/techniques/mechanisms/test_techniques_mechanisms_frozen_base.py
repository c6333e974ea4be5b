"""Frozen layers with quantized weights: their results, the tensors that autograd saves, and layers that stay."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.pytorch_utils import Conv1D

from plimsoll.memory.live import live_bytes
from plimsoll.memory.recorder import Recorder
from plimsoll.techniques.mechanisms.codes import CODECS
from plimsoll.techniques.mechanisms.frozen_base import CodedLinear, KeptOutside, to_codes


class Wrapper(nn.Module):
    """A module that wraps a layer, as in peft."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer


def layer_of(kind, num_inputs=48, num_outputs=32):
    torch.manual_seed(0)
    if kind == "conv1d":
        layer = Conv1D(num_outputs, num_inputs)
        nn.init.normal_(layer.bias)
        return layer.requires_grad_(False)
    return nn.Linear(num_inputs, num_outputs, bias=kind == "linear").requires_grad_(False)


def coded(layer, base):
    return CodedLinear(layer.weight, layer.bias, isinstance(layer, Conv1D), CODECS[base])


def changed(model, base="int8"):
    """Quantize the layers of the wrappers, and return the object that keeps the originals."""
    kept = KeptOutside()
    to_codes([module for module in model.modules() if isinstance(module, Wrapper)], model, kept, base)
    return kept


kinds = pytest.mark.parametrize("kind", ["linear", "conv1d", "without bias"])
bases = pytest.mark.parametrize("base", ["int8", "nf4"])


@bases
@kinds
def test_output_and_gradient_are_those_of_the_rounded_weight(kind, base):
    plain = layer_of(kind)
    layer = coded(plain, base)
    plain.weight.copy_(layer.weight)
    inputs = [torch.randn(4, 5, 48).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    outputs = [one(given) for one, given in zip((layer, plain), inputs, strict=True)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    assert layer.codes.grad is None


@bases
@kinds
def test_under_autocast_it_computes_what_the_rounded_weight_does(kind, base):
    plain = layer_of(kind)
    layer = coded(plain, base)
    plain.weight.copy_(layer.weight)
    outputs, gradients = [], []
    for one in (layer, plain):
        inputs = torch.linspace(-1, 1, 5 * 48).view(5, 48).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(one(inputs))
        outputs[-1].float().square().sum().backward()
        gradients.append(inputs.grad)
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("base", "kept"),
    [
        ("int8", {(torch.int8, 48 * 32), (torch.float32, 32)}),
        ("nf4", {(torch.uint8, 24 * 32), (torch.float32, 3 * 32)}),
    ],
)
@kinds
def test_autograd_keeps_no_dense_weight(kind, base, kept):
    layer, saved = coded(layer_of(kind), base), []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(5, 48, requires_grad=True))
    assert {(tensor.dtype, tensor.numel()) for tensor in saved} == kept


def test_after_a_forward_pass_nothing_dense_is_alive():
    model = nn.Sequential(*(Wrapper(layer_of("linear", 256, 256)) for _ in range(4)))
    kept = changed(model)
    recorder, layers = Recorder(phase=lambda: "forward"), [wrapper.base_layer for wrapper in model]
    hidden = torch.randn(1, 256, requires_grad=True)
    with recorder:
        recorder.know_model(model)
        recorder.step = 1
        for layer in layers:
            hidden = layer(hidden)
        hidden.sum().backward()
    live = live_bytes(recorder.trace("measured", "cpu"))
    assert live.by_category["parameters"].max() == 4 * (256 * 256 + 256 * 4 + 256 * 4)  # codes, scales, biases
    dense_bytes = 4 * 256 * 256
    assert dense_bytes < live.peak_bytes - live.by_category["parameters"].max() < 2 * dense_bytes
    kept.bring_back()


def test_the_original_is_away_and_comes_back_bit_for_bit():
    layer = layer_of("conv1d")
    weight, before = layer.weight, layer.weight.clone()
    model = nn.Sequential(Wrapper(layer))
    kept = changed(model)
    assert kept._pool.holds(weight)
    assert [tuple(one.shape) for one in model.parameters()] == [(32, 48), (32, 1), (32,)]
    kept.bring_back()
    assert layer.weight is weight
    assert torch.equal(weight, before)
    assert not kept._pool.holds(weight)
    assert kept._pool.used_bytes == 0


@bases
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_the_dense_weight_can_be_asked_for(kind, base):
    layer = layer_of(kind)
    weight = coded(layer.bfloat16(), base).weight
    assert weight.dtype == torch.bfloat16
    assert weight.shape == layer.weight.shape
    torch.testing.assert_close(weight, layer.weight, rtol=0.2, atol=0.2 * layer.weight.abs().max().item())


def test_four_bits_need_a_multiple_of_16_inputs():
    model = nn.Sequential(Wrapper(layer_of("linear", 40)), Wrapper(layer_of("linear", 48)))
    changed(model, "nf4")
    assert [type(wrapper.base_layer) for wrapper in model] == [nn.Linear, CodedLinear]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = Wrapper(nn.Linear(4, 4)), nn.Linear(4, 4)
        self.other.weight = self.layer.base_layer.weight


class OwnLinear(nn.Linear):
    """A subclass, whose forward may be different."""


def hooked():
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *given: None)
    return layer


@pytest.mark.parametrize(
    "build",
    [Tied, lambda: nn.Sequential(Wrapper(OwnLinear(4, 4))), lambda: nn.Sequential(Wrapper(hooked()))],
    ids=["tied", "a subclass", "with a hook"],
)
def test_what_it_cannot_stand_in_for_stays(build):
    model = build()
    before = list(model.named_modules())
    changed(model)
    assert list(model.named_modules()) == before
