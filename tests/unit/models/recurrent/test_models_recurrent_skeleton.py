"""Recurrent models load tensor by tensor, as other models do."""

import json

import pytest
import torch

from plimsoll.errors import WeightsError
from plimsoll.models.loading import load_model
from plimsoll.models.recurrent.model import build_recurrent, save_recurrent
from plimsoll.models.recurrent.skeleton import recurrent_fields

LANGUAGE = {"architecture": "lstm", "vocab_size": 30, "embedding_size": 8, "hidden_size": 8}
KINDS = {
    "tied": {**LANGUAGE, "tie_weights": True},
    "two layers": {**LANGUAGE, "num_layers": 2},
    "adaptive": {**LANGUAGE, "adaptive_cutoffs": [10]},
    "classifier": {**LANGUAGE, "architecture": "gru", "num_labels": 3, "bidirectional": True},
    "tagger": {**LANGUAGE, "num_labels": 3, "is_tagger": True},
}


@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_logits_are_those_that_were_saved(kind, place, tmp_path):
    model = build_recurrent(KINDS[kind]).eval()
    save_recurrent(model, tmp_path)
    loaded = load_model(tmp_path, place=place)
    assert type(loaded.model) is type(model)
    assert loaded.missing == loaded.unexpected == ()
    assert list(loaded.model.state_dict()) == list(model.state_dict())
    assert all(torch.equal(loaded.model.state_dict()[name], value) for name, value in model.state_dict().items())
    ids = torch.arange(6).view(2, 3)
    with torch.no_grad():
        # Where a mapped weight begins may decide in which order a kernel sums.
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_what_does_not_belong_together_is_refused(tmp_path):
    save_recurrent(build_recurrent(LANGUAGE), tmp_path)
    assert recurrent_fields(tmp_path)["architecture"] == "lstm"
    assert recurrent_fields(tmp_path / "none") is None
    with pytest.raises(WeightsError, match="is a recurrent model, which has no vocab_size 31: leave it out"):
        load_model(tmp_path, vocab_size=31)
    (tmp_path / "config.json").write_text(json.dumps({**LANGUAGE, "hidden_size": 9}))
    with pytest.raises(WeightsError, match=r"`recurrent.weight_ih_l0` has shape \(32, 8\) .*has shape \(36, 8\)"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LANGUAGE, "hidden": 9}))
    with pytest.raises(WeightsError, match="there is no field `hidden`"):
        load_model(tmp_path)
