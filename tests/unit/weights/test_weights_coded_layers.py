"""Layers over integers: only the rows that are looked up are decoded, and inputs are processed in parts."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerRow,
    PerTensor,
    quantize_,
)

from plimsoll.weights import coded_layers
from plimsoll.weights.coded_layers import CodedEmbedding, LinearInParts, compute_in_parts, decode_rows_only


def coded_table(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, padding_idx=0, dtype=dtype))
    quantize_(
        model, Int8WeightOnlyConfig(set_inductor_config=False), lambda module, _: isinstance(module, nn.Embedding)
    )
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_bitwise_those_of_the_whole_table(dtype):
    model, ids = coded_table(dtype), torch.tensor([[0, 3], [49, 3]])
    with torch.no_grad():
        expected = model(ids)
        decode_rows_only(model)
        assert type(model[0]) is CodedEmbedding
        assert model(ids).dtype == expected.dtype == dtype
        assert torch.equal(model(ids), expected)
    assert model[0].padding_idx == 0
    assert (model[0].num_embeddings, model[0].embedding_dim) == (50, 8)


def test_dense_tables_stay():
    model = nn.Sequential(nn.Embedding(5, 4))
    decode_rows_only(model)
    assert type(model[0]) is nn.Embedding


def coded(config, dtype=torch.float32, bias=True, inputs=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 48, bias=bias, dtype=dtype))
    quantize_(model, config(set_inductor_config=False))
    return model


class LargestProduct(TorchDispatchMode):
    """A mode that records the bytes of the largest int32 tensor."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.dtype == torch.int32:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("shape", [(32,), (1, 32), (32, 32), (33, 32), (2, 50, 32), (4, 4, 4, 32)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_bitwise_those_of_the_whole_input(monkeypatch, dtype, bias, shape):
    # The weight is 32 x 48, so a part has 32 rows. The largest input has 64 rows.
    monkeypatch.setattr(coded_layers, "PART_BYTES", 1)
    model, inputs = coded(Int8DynamicActivationInt8WeightConfig, dtype, bias), torch.randn(shape).to(dtype)
    with torch.no_grad():
        expected = model(inputs)
        compute_in_parts(model)
        assert type(model[0]) is LinearInParts
        assert model(inputs).dtype == dtype
        assert torch.equal(model(inputs), expected)
    assert (model[0].in_features, model[0].out_features) == (32, 48)
    assert torch.equal(model(inputs.requires_grad_()), expected)  # the model runs outside no_grad


@pytest.mark.parametrize(("part_bytes", "most_bytes"), [(1, 192 * 25), (192 * 50, 192 * 50), (1 << 20, 192 * 100)])
def test_a_product_is_as_large_as_the_weight_or_as_it_may_be(monkeypatch, part_bytes, most_bytes):
    monkeypatch.setattr(coded_layers, "PART_BYTES", part_bytes)
    model = coded(Int8DynamicActivationInt8WeightConfig)
    compute_in_parts(model)
    with torch.no_grad(), LargestProduct() as products:
        model(torch.randn(100, 32))
    assert products.num_bytes == most_bytes


def test_a_layer_that_two_places_share_computes_so_in_both():
    model = nn.ModuleDict({"one": coded(Int8DynamicActivationInt8WeightConfig)[0]})
    model["other"] = model["one"]
    compute_in_parts(model)
    assert type(model["one"]) is type(model["other"]) is LinearInParts
    assert model["one"].weight is model["other"].weight


def test_other_layers_stay():
    one_scale = partial(Int8DynamicActivationInt8WeightConfig, granularity=[PerTensor(), PerRow()])
    model = nn.Sequential(nn.Linear(5, 4), *coded(Int8WeightOnlyConfig), *coded(one_scale))
    compute_in_parts(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, nn.Linear]
