"""Removal of recurrent units: dead units without loss, for all numbers of layers, directions and gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.units import Units
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.records.plan import Choice
from pruned_models import shapes_of, small_model

UNITS = Units()
DEAD = [1, 4, 7]
SIZES: dict[str, Any] = {"vocab_size": 20, "embedding_size": 6, "hidden_size": 12, "num_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "language model": {},
    "tied": {"tie_weights": True, "embedding_size": 12},
    "classifier": {"num_labels": 3},
    "both ways": {"num_labels": 3, "bidirectional": True},
    "tagger": {"num_labels": 3, "bidirectional": True, "is_tagger": True},
}


def chosen(**options: float | str) -> Choice:
    return Choice(technique="units", options=options)


def built(architecture: str, kind: str, device: str = "cpu", **fields: Any) -> Any:
    torch.manual_seed(0)
    fields = SIZES | {"architecture": architecture} | KINDS[kind] | fields
    with torch.device(device):
        return build_recurrent(fields).eval()


def batches_of(model: Any) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        ids = torch.randint(1, 20, (3, 7), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        shape = (3,) if model.config.num_labels and not model.config.is_tagger else (3, 7)
        labels = torch.randint(0, model.config.num_labels or 20, shape, generator=generator)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**next(batches_of(model))).logits


def kill(model: Any) -> None:
    """Zero the weights that read the dead units of any layer and direction.

    If embedding and output are tied, the units are dimensions of the embedding as well.
    """
    for name, weight in model.named_parameters():
        reads = "weight_hh" in name or "weight_ih_l1" in name or name in {"head.weight", "embedding.weight"}
        if reads and weight.shape[1] % 12 == 0:
            weight.data.view(len(weight), -1, 12)[:, :, DEAD] = 0


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "activation"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["lstm", "gru", "rnn"])
def test_dead_units_leave_without_a_trace(architecture: str, kind: str, importance: str):
    model = built(architecture, kind)
    kill(model)
    before = logits_of(model)
    choice = chosen(share=0.25, importance=importance)
    UNITS.shrink(Bundle(model), choice, Calibration(lambda: batches_of(model)))
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=1e-6)
    assert model.config.hidden_size == model.recurrent.hidden_size == 9
    model(**next(batches_of(model))).loss.backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())
    on_meta = Bundle(built(architecture, kind, "meta"))
    UNITS.shrink(on_meta, choice, Calibration())
    assert shapes_of(on_meta.model) == shapes_of(model)


def test_each_layer_and_direction_keeps_its_own():
    model = built("lstm", "both ways")
    with torch.no_grad():
        for number, name in enumerate(("l0", "l0_reverse", "l1", "l1_reverse")):
            getattr(model.recurrent, f"weight_hh_{name}")[:, number] = 0
            getattr(model.recurrent, f"bias_ih_{name}").copy_(torch.arange(48.0))
        reads = [model.recurrent.weight_ih_l1, model.recurrent.weight_ih_l1_reverse, model.head.weight]
        for weight, (forward, backward) in zip(reads, ((0, 13), (0, 13), (2, 15)), strict=True):
            weight[:, [forward, backward]] = 0
    UNITS.shrink(Bundle(model), chosen(share=1 / 12), Calibration())
    for number, name in enumerate(("l0", "l0_reverse", "l1", "l1_reverse")):
        kept = [row for row in range(48) if row % 12 != number]
        assert getattr(model.recurrent, f"bias_ih_{name}").tolist() == kept


def test_a_tied_embedding_leaves_with_the_units():
    model = built("lstm", "tied")
    UNITS.shrink(Bundle(model), chosen(share=0.5), Calibration())
    assert (model.config.embedding_size, model.config.hidden_size) == (6, 6)
    assert model.head.weight is model.embedding.weight


def test_what_is_left_is_saved_and_read_again(tmp_path):
    from plimsoll.models.recurrent.model import load_recurrent, save_recurrent

    model = built("gru", "classifier")
    UNITS.shrink(Bundle(model), chosen(), Calibration())
    save_recurrent(model, tmp_path)
    assert torch.equal(logits_of(load_recurrent(tmp_path).eval()), logits_of(model))


def test_what_cannot_be_is_refused():
    said = UNITS.choices(Bundle(small_model("bert", "meta")))
    assert "BertForSequenceClassification has no recurrent layers: looked for an LSTM, GRU or RNN" in said
    assert "Linear has no recurrent layers" in UNITS.choices(Bundle(nn.Linear(1, 1)))
    adaptive = built("lstm", "language model", "meta", adaptive_cutoffs=(4,))
    assert "adaptive softmax with cutoffs [4], the feature sizes of rare words" in UNITS.choices(Bundle(adaptive))
    plain = Bundle(built("lstm", "language model", "meta"))
    assert "a share of 0.01 of 12 units is none of them" in str(UNITS.refusal(plain, chosen(share=0.01)))
    assert [str(choice) for choice in UNITS.choices(plain)] == ["units=0.125", "units=0.25", "units=0.5"]
