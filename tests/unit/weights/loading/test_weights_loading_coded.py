"""Weights of torchao that are stored as several tensors."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from plimsoll.errors import WeightsError
from plimsoll.weights.loading import open_checkpoint
from quantized_models import made, shrunk

NAME = "model.layers.0.mlp.up_proj.weight"


def saved_again(folder, change_tensors=None, change_metadata=None):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    (change_tensors or (lambda tensors: None))(tensors)
    (change_metadata or (lambda metadata: None))(metadata)
    save_file(tensors, file, metadata)


@pytest.fixture
def folder(tmp_path):
    shrunk("int8", made("llama")).save_pretrained(tmp_path)
    return tmp_path


def test_parts_are_one_entry_under_the_name_of_the_weight(folder):
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries[NAME]
    assert (entry.shape, entry.dtype, entry.num_bytes) == ((64, 32), torch.float32, 64 * 32 + 64 * 5)
    assert not any("_weight_" in name for name in checkpoint.entries)
    assert set(checkpoint.coded[NAME].parts) == {"qdata", "scale", "zero_point"}
    assert "lm_head.weight" not in checkpoint.coded
    whole = checkpoint.coded[NAME].make(lambda part: part.read())
    assert type(whole).__name__ == "Int8Tensor"


def test_a_part_that_is_missing_is_named(folder):
    saved_again(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj._weight_scale"))
    with pytest.raises(WeightsError, match="is a Int8Tensor of 3 parts, of which 1 are missing"):
        open_checkpoint(folder)


def test_a_class_that_torchao_does_not_list_is_not_made(folder):
    def change(metadata):
        metadata[NAME] = json.dumps({**json.loads(metadata[NAME]), "_type": "Popen"})

    saved_again(folder, change_metadata=change)
    with pytest.raises(WeightsError, match=r"cannot be built from its 3 parts \(Failed to find class Popen"):
        open_checkpoint(folder)


def test_a_header_that_cannot_be_read_is_said(folder):
    saved_again(folder, change_metadata=lambda metadata: metadata.update({"tensor_names": "{"}))
    with pytest.raises(WeightsError, match="cannot read from the header .* which tensors form the quantized weights"):
        open_checkpoint(folder)
