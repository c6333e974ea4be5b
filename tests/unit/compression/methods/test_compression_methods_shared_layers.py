"""Groups of layers with one set of parameters."""

from __future__ import annotations

import torch

from plimsoll.compression.methods import Calibration
from plimsoll.compression.methods.shared_layers import SharedLayers
from plimsoll.records.plan import Choice
from shrink_models import CORPUS, bundle, ids_of, num_bytes, outputs

METHOD = SharedLayers()


def choice(**options) -> Choice:
    return Choice(technique="shared_layers", options=options)


def test_a_group_has_the_mean_or_the_first_of_its_layers():
    layers = [layer.mlp.c_fc.weight.detach().clone() for layer in bundle("gpt2").model.transformer.h]
    for start, wanted in (("mean", (layers[0] + layers[1]) / 2), ("first", layers[0])):
        given = bundle("gpt2")
        METHOD.shrink(given, choice(groups=2, start=start), Calibration())
        blocks = given.model.transformer.h
        assert torch.allclose(blocks[0].mlp.c_fc.weight, wanted)
        assert blocks[1].mlp.c_fc.weight is blocks[0].mlp.c_fc.weight
        assert torch.equal(blocks[2].mlp.c_fc.weight, layers[2])
        assert given.model.config.shrunk["shared"] == {"transformer.h.1": "transformer.h.0"}


def test_layers_that_are_alike_lose_nothing_and_stay_apart():
    given = bundle("llama")
    layers = given.model.model.layers
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    ids_BT = ids_of(given.tokenizer, CORPUS[0])
    wanted, before = outputs(given.model, ids_BT), num_bytes(given.model)
    METHOD.shrink(given, choice(groups=1), Calibration())
    assert torch.allclose(outputs(given.model, ids_BT), wanted, atol=1e-5)
    assert num_bytes(given.model) < before
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    cached, plain = (given.model.generate(ids_BT, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


def test_bad_input_is_refused_with_what_to_do():
    assert "no list of layers" in METHOD.choices(bundle("lstm-classifier"))
    given = bundle("bert")
    assert [one.options["groups"] for one in METHOD.choices(given)] == [2, 1]
    assert "give fewer groups" in METHOD.refusal(given, choice(groups=3))
    METHOD.shrink(given, choice(groups=1), Calibration())
    assert "already share parameters" in METHOD.choices(given)
    other = bundle("bert")
    other.model.bert.encoder.layer[1].intermediate.dense.weight = torch.nn.Parameter(torch.zeros(40, 32))
    assert "differ in size" in METHOD.choices(other)
