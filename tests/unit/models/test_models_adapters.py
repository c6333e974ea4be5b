"""Adapters of peft, merged while a model is loaded: bitwise equal to peft's own merge."""

import copy
from pathlib import Path

import pytest
import torch

from checkpoints import saved
from plimsoll.errors import WeightsError
from plimsoll.models.loading import load_model

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapter(model: torch.nn.Module, folder: Path, **fields: object) -> Path:
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, lora_alpha=7, **fields))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{"use_rslora": True}, {"use_dora": True}], ids=str)
def test_merged_weights_are_bitwise_those_of_peft(fields, dtype, place, tmp_path):
    model = saved("llama", tmp_path / "model")
    folders = [
        adapter(model, tmp_path / "one", target_modules=["q_proj", "up_proj"], **fields),
        adapter(model, tmp_path / "two", target_modules=["up_proj", "down_proj"]),
    ]
    plain = type(model).from_pretrained(tmp_path / "model", dtype=dtype)
    for folder in folders:
        plain = peft.PeftModel.from_pretrained(plain, folder).merge_and_unload()
    loaded = load_model(tmp_path / "model", dtype=dtype, place=place, adapters=folders).model
    assert list(loaded.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_an_adapter_of_another_model_is_refused(tmp_path):
    model = saved("llama", tmp_path / "llama")
    saved("gpt2", tmp_path / "gpt2")
    folder = adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(WeightsError, match=r"does not fit GPT2LMHeadModel .*give the checkpoint that it was trained"):
        load_model(tmp_path / "gpt2", adapters=[folder])
    with pytest.raises(WeightsError, match="has no adapter_config.json: give a folder"):
        load_model(tmp_path / "llama", adapters=[tmp_path / "gpt2"])
