"""Integer weights: quantized while they are read, and loaded as they were saved."""

import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

from checkpoints import saved
from plimsoll.errors import JobError, WeightsError
from plimsoll.models import quantized
from plimsoll.models.hugging_face import TextShape, load_hugging_face
from plimsoll.models.loading import load_model, sketch_checkpoint
from plimsoll.models.quantized import can_be_quantized
from plimsoll.weights.loading import open_checkpoint
from plimsoll.weights.parts import model_bytes, plain_parts
from quantized_models import IDS, logits, made, shrunk


def plainly_quantized(folder, kind: str) -> nn.Module:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = Int8WeightOnlyConfig() if kind == "int8" else PrototypeInt4WeightOnlyConfig(group_size=32)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    return model


@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_logits_are_those_of_torchao_on_the_whole_model(kind, place, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "_BLOCK_NUMBERS", 64 * 32)  # so that there are several blocks, the last one smaller
    saved("llama", tmp_path, intermediate_size=160)
    loaded = load_model(tmp_path, dtype=torch.bfloat16, quantize=kind, place=place)
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(loaded.model(ids).logits, plainly_quantized(tmp_path, kind)(ids).logits)
    assert type(loaded.model.lm_head.weight.data) is torch.Tensor


def test_a_model_without_linear_layers_is_refused(tmp_path):
    saved("gpt2", tmp_path)
    with pytest.raises(WeightsError, match="quantize int8 finds no layer in a GPT2LMHeadModel"):
        load_model(tmp_path, quantize="int8")


def test_int4_is_of_layers_that_the_kernel_can_have():
    assert can_be_quantized(nn.Linear(7, 5), "int8")
    assert not can_be_quantized(nn.Linear(64, 24), "int4")
    assert not can_be_quantized(nn.Linear(48, 64), "int4")
    assert not can_be_quantized(nn.Embedding(64, 64), "int8")
    with pytest.raises(WeightsError, match="int4 weights cannot be made on device cuda: use int8"):
        quantized._config_of("int4", torch.device("cuda"))


NAMES = ("bert", "llama", "t5", "opt", "distilbert", "gpt-neox", "mixtral", "roberta")

PLAIN = """
import sys, torch
sys.modules["plimsoll"] = None
import transformers
for folder in sys.argv[1:]:
    ids, expected = torch.load(folder + "/expected.pt")
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, name).from_pretrained(folder)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected), folder
print("same")
"""


def logits_of(model, more):
    with torch.inference_mode():
        return model(IDS, **more).logits


@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_folder_is_read_and_written_as_it_is(name, tmp_path):
    model = shrunk("int8", made(name))
    more = {"decoder_input_ids": IDS} if name == "t5" else {}
    model.save_pretrained(tmp_path / "one")
    for place in ("memory", "mapped"):
        loaded = load_model(tmp_path / "one", place=place).model
        assert torch.equal(logits_of(loaded, more), logits_of(model, more))
        assert model_bytes(loaded) == model_bytes(model)
    loaded.save_pretrained(tmp_path / "two")
    one, two = (open_checkpoint(tmp_path / folder) for folder in ("one", "two"))
    assert one.num_bytes == two.num_bytes == model_bytes(model)
    assert torch.equal(logits_of(load_model(tmp_path / "two").model, more), logits_of(model, more))


def test_a_sketch_has_the_bytes_of_the_model(tmp_path):
    model = shrunk("int4", shrunk("int8_embeddings", made("llama")), compute="fp32")
    model.save_pretrained(tmp_path)
    skeleton, checkpoint = sketch_checkpoint(tmp_path)
    assert model_bytes(skeleton.model) == model_bytes(model) == checkpoint.num_bytes
    assert all(part.is_meta for weight in skeleton.model.parameters() for part in plain_parts(weight).values())


@pytest.mark.long
def test_plain_transformers_gives_the_same_numbers(tmp_path):
    folders = []
    for method in ("int8", "dynamic_int8", "float8", "int8_embeddings"):
        model = shrunk(method, made("llama"))
        model.save_pretrained(tmp_path / method)
        torch.save((IDS, logits(model)), tmp_path / method / "expected.pt")
        folders.append(str(tmp_path / method))
    done = subprocess.run([sys.executable, "-c", PLAIN, *folders], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr


def test_integers_cannot_learn(tmp_path):
    shrunk("int8", made("llama")).save_pretrained(tmp_path)
    with pytest.raises(JobError, match="integer weights cannot be trained: train the original model"):
        load_hugging_face(tmp_path, TextShape(100, None, 1, 16), "cpu")


def test_what_needs_dense_weights_is_refused(tmp_path):
    shrunk("int8", made("llama")).save_pretrained(tmp_path)
    for name, value in (("quantize", "int8"), ("vocab_size", 120), ("dtype", torch.bfloat16), ("adapters", ["x"])):
        with pytest.raises(WeightsError, match=f"is quantized already .* and cannot be loaded with {name}"):
            load_model(tmp_path, **{name: value})
    assert load_model(tmp_path, dtype=torch.float32).num_bytes


def test_what_others_quantized_is_refused(tmp_path):
    model = made("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    made("llama").save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"is quantized already \(by gptq, with 0 weights of torchao"):
        load_model(tmp_path)
