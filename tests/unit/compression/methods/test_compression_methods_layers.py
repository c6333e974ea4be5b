"""Removal of layers: the selection of layers, the outputs of the others, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration
from plimsoll.compression.methods.layers import Layers, renumber, renumbered
from plimsoll.models.loading import load_model
from plimsoll.records.plan import Choice
from plimsoll.weights import structure
from pruned_models import ARCHITECTURES, batches_of, logits_of, shapes_of, small_model

LAYERS = Layers()


def chosen(**options: float | str) -> Choice:
    return Choice(technique="layers", options=options)


def with_layers(name: str, num_layers: int) -> dict[str, int]:
    return {{"gpt2": "n_layer", "distilbert": "n_layers"}.get(name, "num_hidden_layers"): num_layers}


def stack(model: nn.Module) -> nn.ModuleList:
    return next(one for one in model.modules() if isinstance(one, nn.ModuleList))


class Nothing(nn.Module):
    """A layer that returns its input."""

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> object:
        return (hidden,) if self.returns_tuple else hidden


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_others_compute_what_they_did(name: str):
    """The remaining layers compute the same outputs.

    The second and the third of four layers are removed, which equals replacing them by the identity.
    """
    model = small_model(name, **with_layers(name, 4))
    bundle = Bundle(small_model(name, **with_layers(name, 4)))
    bundle.model.load_state_dict(model.state_dict())
    LAYERS.shrink(bundle, chosen(keep=2), Calibration())
    first = stack(model)[0]
    returned = []
    hook = first.register_forward_hook(lambda _, __, out: returned.append(out))
    logits_of(model)
    hook.remove()
    stack(model)[1] = stack(model)[2] = Nothing(isinstance(returned[0], tuple))
    torch.testing.assert_close(logits_of(bundle.model), logits_of(model), rtol=0, atol=0)
    assert bundle.model.config.num_hidden_layers == len(stack(bundle.model)) == 2
    on_meta = Bundle(small_model(name, "meta", **with_layers(name, 4)))
    LAYERS.shrink(on_meta, chosen(keep=2), Calibration())
    assert shapes_of(on_meta.model) == shapes_of(bundle.model)


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "activation"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_dead_layer_is_the_one_left_out(name: str, importance: str):
    model = small_model(name, **with_layers(name, 3))
    for parameter in stack(model)[1].parameters():
        parameter.data.zero_()
    before = logits_of(model)
    LAYERS.shrink(Bundle(model), chosen(keep=2, importance=importance), Calibration(lambda: batches_of(model)))
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=0)


def test_generation_with_a_cache_goes_on():
    model = small_model("llama", **with_layers("llama", 4))
    LAYERS.shrink(Bundle(model), chosen(keep=2), Calibration())
    ids = next(batches_of(model))["input_ids"][:, :4]
    with_cache, without = (
        model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_what_is_noted_of_layers_goes_with_them(tmp_path):
    model = small_model("bert", num_hidden_layers=4)
    SHRINKERS["heads"].shrink(Bundle(model), Choice(technique="heads"), Calibration())
    LAYERS.shrink(Bundle(model), chosen(keep=2), Calibration())
    noted = model.config.shrunk["attributes"]
    assert sorted(noted) == [f"bert.encoder.layer.{number}.attention.self" for number in (0, 1)]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(load_model(tmp_path).model.eval()), logits_of(model))


def test_what_the_configuration_says_of_each_layer_is_shortened():
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    fields = {"layer_types": kinds, "sliding_window": 4, "use_sliding_window": True}
    model = small_model("qwen2", num_hidden_layers=4, **fields)
    LAYERS.shrink(Bundle(model), chosen(share=0.25), Calibration())
    assert model.config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert logits_of(model).isfinite().all()


def test_it_offers_three_quarters_and_a_half():
    bundle = Bundle(small_model("bert", "meta", num_hidden_layers=12))
    assert [str(choice) for choice in LAYERS.choices(bundle)] == ["layers=9", "layers=6"]


@pytest.mark.parametrize(
    ("name", "fields", "options", "said"),
    [
        ("bert", {}, {"keep": 2}, "cannot keep 2 of 2: give keep from 1 to 1"),
        ("bert", {}, {"share": 0.1}, "a share of 0.1 of 2 layers is none of them: give a share from 0.5 to 0.5"),
        ("bert", {"num_hidden_layers": 1}, {"keep": 1}, "has 1 layer, which cannot be removed"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_layer": 4}, {"keep": 2}, "keep all layers"),
    ],
)
def test_wrong_choices_are_refused(name: str, fields: dict[str, int], options: dict[str, float], said: str):
    assert said in str(LAYERS.refusal(Bundle(small_model(name, "meta", **fields)), chosen(**options)))


def test_models_without_a_stack_of_their_own_are_refused():
    import transformers

    with torch.device("meta"):
        shared = transformers.AlbertModel(transformers.AlbertConfig(hidden_size=16, num_attention_heads=2))
    assert "they may share their weights" in LAYERS.choices(Bundle(shared))
    assert "Linear has no single stack of layers: looked for" in LAYERS.choices(Bundle(nn.Linear(2, 2)))


def test_what_is_noted_of_layers_has_the_numbers_of_those_that_are_left():
    """Notes about removed layers are renumbered.

    Three layers used the parameters of a removed layer. Now the first remaining layer owns them.
    """
    model = small_model("bert", num_hidden_layers=4)
    layers = "bert.encoder.layer"
    for number in (1, 2, 3):
        structure.use_parameters_of(model.bert.encoder.layer[0], model.bert.encoder.layer[number])
        structure.note(model, "shared", f"{layers}.{number}", f"{layers}.0")
    model.bert.encoder.layer = nn.ModuleList([model.bert.encoder.layer[1], model.bert.encoder.layer[3]])
    renumber(model, layers, [1, 3])
    assert model.config.shrunk == {"shared": {f"{layers}.1": f"{layers}.0"}}
    assert f"{layers}.1.output.dense.weight" in model.all_tied_weights_keys


def test_lists_of_names_lose_what_is_gone():
    noted = {"gpu_only": ["a.0.b", "a.2.b", "c"], "factored": {"a.0.b": 3, "a.1.b": 4}}
    assert renumbered(noted, "a", [0, 2]) == {"gpu_only": ["a.0.b", "a.1.b", "c"], "factored": {"a.0.b": 3}}
