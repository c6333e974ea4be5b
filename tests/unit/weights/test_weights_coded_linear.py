"""Linear layers over integers, some rows of the input after the other."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

from plimsoll.weights import coded_linear
from plimsoll.weights.coded_linear import CodedLinear, compute_in_rows


def coded(config, dtype=torch.float32, bias=True, inputs=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 48, bias=bias, dtype=dtype))
    quantize_(model, config(set_inductor_config=False))
    return model


class LargestProduct(TorchDispatchMode):
    """Notes the bytes of the largest tensor of int32."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.dtype == torch.int32:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("shape", [(32,), (1, 32), (7, 32), (2, 5, 32), (4, 4, 4, 32)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_bitwise_those_of_the_whole_input(monkeypatch, dtype, bias, shape):
    # The weight has 1,536 bytes and a row's product 192: 8 rows at once, which the largest input has as a remainder.
    monkeypatch.setattr(coded_linear, "PART_BYTES", 1)
    model, inputs = coded(Int8DynamicActivationInt8WeightConfig, dtype, bias), torch.randn(shape).to(dtype)
    with torch.no_grad():
        expected = model(inputs)
        compute_in_rows(model)
        assert type(model[0]) is CodedLinear
        assert model(inputs).dtype == dtype
        assert torch.equal(model(inputs), expected)
    assert (model[0].in_features, model[0].out_features) == (32, 48)
    assert torch.equal(model(inputs.requires_grad_()), expected)  # a model outside of no_grad


@pytest.mark.parametrize(("part_bytes", "most_bytes"), [(1, 1536), (2000, 1920), (1 << 20, 192 * 100)])
def test_a_product_is_as_large_as_the_weight_or_as_it_may_be(monkeypatch, part_bytes, most_bytes):
    monkeypatch.setattr(coded_linear, "PART_BYTES", part_bytes)
    model = coded(Int8DynamicActivationInt8WeightConfig)
    compute_in_rows(model)
    with torch.no_grad(), LargestProduct() as products:
        model(torch.randn(100, 32))
    assert products.num_bytes == most_bytes


def test_a_layer_that_two_places_share_computes_so_in_both():
    model = nn.ModuleDict({"one": coded(Int8DynamicActivationInt8WeightConfig)[0]})
    model["other"] = model["one"]
    compute_in_rows(model)
    assert type(model["one"]) is type(model["other"]) is CodedLinear
    assert model["one"].weight is model["other"].weight


def test_other_layers_stay():
    model = nn.Sequential(nn.Linear(5, 4), *coded(Int8WeightOnlyConfig))
    compute_in_rows(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
