"""The cross entropy in chunks: all options against torch in fp64, half precision, and unsupported inputs."""

import pytest
import torch
from torch.nn import functional

from plimsoll.errors import InputError
from plimsoll.techniques.mechanisms.chunked_cross_entropy import Layer, LossOptions, chunked_cross_entropy

TOKENS, FEATURES, OUTPUTS = 37, 8, 50


def options_of(chunk_tokens=4, dtype=torch.float64, **changes):
    loss_dtype = changes.pop("loss_dtype", dtype)
    return LossOptions(chunk_tokens, changes.pop("compute_dtype", dtype), dtype, loss_dtype, **changes)


def inputs_of(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    layer = Layer(torch.randn(TOKENS, FEATURES), torch.randn(OUTPUTS, FEATURES), torch.randn(OUTPUTS) if bias else None)
    target = torch.randint(OUTPUTS, (TOKENS,))
    target[5:20] = -100
    return layer.map(lambda tensor: tensor.to(dtype).requires_grad_()), target


def gradients_of(loss, layer, arriving=None):
    return torch.autograd.grad(loss, [tensor for tensor in layer if tensor is not None], arriving)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_option_is_torchs(reduction, label_smoothing, bias, chunk_tokens):
    layer, target = inputs_of(bias=bias)
    plain = functional.cross_entropy(
        0.5 * functional.linear(*layer), target, reduction=reduction, label_smoothing=label_smoothing
    )
    options = options_of(chunk_tokens, reduction=reduction, label_smoothing=label_smoothing, scale=0.5)
    chunked = chunked_cross_entropy(layer, target, options)
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    arriving = torch.randn_like(plain)
    for one, other in zip(gradients_of(chunked, layer, arriving), gradients_of(plain, layer, arriving), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(layer, target, options), chunked)


def test_an_ignored_label_may_be_any_number():
    layer, target = inputs_of()
    target[target == -100] = 7
    plain = functional.cross_entropy(functional.linear(*layer), target, ignore_index=7)
    chunked = chunked_cross_entropy(layer, target, options_of(ignore_index=7))
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=0)


def test_without_any_label_it_is_what_torch_says():
    layer, target = inputs_of()
    target[:] = -100
    chunked = chunked_cross_entropy(layer, target, options_of())
    assert chunked.isnan()
    assert all(not gradient.any() for gradient in gradients_of(chunked, layer))
    total = chunked_cross_entropy(layer, target, options_of(reduction="sum"))
    assert total == 0


def test_no_tokens_at_all():
    layer, target = inputs_of()
    layer = layer._replace(hidden_ND=torch.zeros(0, FEATURES, dtype=torch.float64, requires_grad=True))
    total = chunked_cross_entropy(layer, target[:0], options_of(reduction="sum"))
    assert total == 0
    assert [gradient.shape for gradient in gradients_of(total, layer)] == [
        (0, FEATURES),
        (OUTPUTS, FEATURES),
        (OUTPUTS,),
    ]


def test_only_what_needs_a_gradient_gets_one():
    layer, target = inputs_of()
    layer.weight_VD.requires_grad_(False)
    chunked_cross_entropy(layer, target, options_of()).backward()
    assert layer.weight_VD.grad is None
    assert layer.hidden_ND.grad is not None
    assert layer.bias_V.grad is not None


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_fp32_sums(compute_dtype):
    layer, target = inputs_of(torch.float32)
    rounded = layer.map(lambda tensor: tensor.detach().to(compute_dtype))
    plain = functional.cross_entropy(functional.linear(*rounded).double(), target)
    options = options_of(dtype=compute_dtype, loss_dtype=torch.float32)
    chunked = chunked_cross_entropy(layer, target, options)
    torch.testing.assert_close(chunked.double(), plain, rtol=1e-6, atol=0)
    reference = functional.cross_entropy(functional.linear(*layer), target)
    for one, other in zip(gradients_of(chunked, layer), gradients_of(reference, layer), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() / other.abs().max() < 0.02


def test_the_scale_of_a_gradient_scaler_arrives_before_fp16_rounds():
    # 2**-24 is the least number of fp16: gradients of a 50,000th of a mean are below it without the scale.
    layer, target = inputs_of(torch.float32)
    options = options_of(dtype=torch.float16, compute_dtype=torch.float16, loss_dtype=torch.float32)
    small = 1e-6
    loss = chunked_cross_entropy(layer, target, options) * small
    scaled = gradients_of(loss * 2.0**20, layer)
    plain = gradients_of(functional.cross_entropy(functional.linear(*layer), target) * small, layer)
    for one, other in zip(scaled, plain, strict=True):
        error = (one / 2.0**20 - other).abs().max() / other.abs().max()
        assert error < 0.02


def test_gradients_of_a_half_precision_model_are_added_up_in_fp32():
    layer, _ = inputs_of(torch.bfloat16, bias=False)
    layer = layer._replace(hidden_ND=torch.ones(4096, FEATURES, dtype=torch.bfloat16, requires_grad=True))
    target = torch.zeros(4096, dtype=torch.long)
    options = options_of(8, torch.bfloat16, loss_dtype=torch.bfloat16, reduction="sum")
    _, gradient = gradients_of(chunked_cross_entropy(layer, target, options), layer)
    plain = gradients_of(functional.cross_entropy(functional.linear(*layer).double(), target, reduction="sum"), layer)[
        1
    ]
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, plain, rtol=0.02, atol=0)


def test_a_graph_that_is_kept_can_be_gone_through_again():
    layer, target = inputs_of()
    loss = chunked_cross_entropy(layer, target, options_of())
    first = torch.autograd.grad(2 * loss, list(layer), retain_graph=True)
    second = torch.autograd.grad(loss, list(layer))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, 2 * other)
    with pytest.raises(InputError, match="pass retain_graph=True to the first backward"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_refused(reduction):
    layer, target = inputs_of()
    loss = chunked_cross_entropy(layer, target, options_of(reduction=reduction)).sum()
    with pytest.raises(InputError, match="twice, with create_graph=True.*leave chunked_loss out"):
        torch.autograd.grad(loss, list(layer), create_graph=True)


def test_backward_gives_its_gradients_away():
    layer, target = inputs_of()
    loss = chunked_cross_entropy(layer, target, options_of())
    loss.backward()
    assert loss.grad_fn.gradients is None
