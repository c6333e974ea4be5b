"""Rows of int8 that are decoded when they are looked up."""

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from plimsoll.weights.coded_embedding import CodedEmbedding, decode_rows_only


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
