"""Names of layers after some of them were taken away."""

from __future__ import annotations

from torch import nn

from plimsoll.compression.renumbered import renumber, renumbered
from plimsoll.weights import structure
from pruned_models import small_model


def test_what_is_noted_of_layers_has_the_numbers_of_those_that_are_left():
    """The layer whose parameters others have is gone: the first that is left has them."""
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
