"""A model without memory, in which each weight knows its checkpoint entry."""

import pytest
import torch
import transformers

from checkpoints import saved
from plimsoll.errors import WeightsError
from plimsoll.models.skeleton import quiet, replace, skeleton_of, slots_of
from plimsoll.weights.loading import open_checkpoint


def test_every_weight_is_on_the_meta_device_and_has_its_entry(tmp_path):
    model = saved("gpt2", tmp_path)
    skeleton = skeleton_of(open_checkpoint(tmp_path), transformers.GPT2LMHeadModel, model.config, torch.float32)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert all(weight.entry is not None for weight in skeleton.weights.values())
    assert not skeleton.derived
    assert len(skeleton.weights["transformer.wte.weight"].slots) == 2  # tied to the output
    assert skeleton.missing == skeleton.unexpected == ()


def test_experts_are_derived_of_their_parts(tmp_path):
    model = saved("mixtral", tmp_path)
    skeleton = skeleton_of(open_checkpoint(tmp_path), transformers.MixtralForCausalLM, model.config, torch.float32)
    assert {len(group.entries) for group in skeleton.derived} == {4, 8}
    fused = next(group for group in skeleton.derived if group.key.endswith("layers.0.mlp.experts.gate_up_proj"))
    made = fused.make(lambda entry, dtype: entry.read().to(dtype))
    assert torch.equal(made[fused.key], model.state_dict()[fused.key])


def test_another_shape_names_the_weight_and_both_shapes(tmp_path):
    config = saved("bert", tmp_path).config
    config.intermediate_size = 65
    with pytest.raises(WeightsError, match=r"`bert.encoder.layer.0.*` has shape \(64.*but \(65.*6 such weights"):
        skeleton_of(open_checkpoint(tmp_path), transformers.BertForSequenceClassification, config, torch.float32)


def test_replacing_reaches_every_place(tmp_path):
    model = saved("gpt2", tmp_path)
    skeleton = skeleton_of(open_checkpoint(tmp_path), transformers.GPT2LMHeadModel, model.config, torch.float32)
    new = torch.nn.Parameter(torch.ones(100, 32))
    replace(skeleton.weights["transformer.wte.weight"], new)
    assert skeleton.model.lm_head.weight is skeleton.model.transformer.wte.weight is new


def test_slots_are_all_places_with_their_names():
    linear = torch.nn.Linear(2, 2, bias=False)
    names = [name for name, _, _ in slots_of(torch.nn.Sequential(linear, torch.nn.BatchNorm1d(2, affine=False)))]
    assert names == ["0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_transformers_says_nothing_meanwhile():
    before = transformers.utils.logging.get_verbosity()
    with quiet():
        assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.ERROR
    assert transformers.utils.logging.get_verbosity() == before
