"""Recurrent models: padding changes nothing, the loss is the hand-written one, and files load back bitwise."""

import pytest
import torch
from torch.nn import functional

from plimsoll.errors import JobError
from plimsoll.models.recurrent.model import (
    RECURRENT,
    RecurrentClassifier,
    RecurrentLanguageModel,
    build_recurrent,
    load_recurrent,
    save_recurrent,
)

SMALL = {"vocab_size": 11, "embedding_size": 4, "hidden_size": 4}


def build(architecture="lstm", **fields):
    torch.manual_seed(0)
    return build_recurrent({"architecture": architecture, **SMALL, **fields})


@pytest.mark.parametrize("architecture", RECURRENT)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_classifier_does_not_see_padding(architecture, bidirectional):
    model = build(architecture, num_labels=3, num_layers=2, bidirectional=bidirectional)
    input_ids = torch.randint(1, 11, (4, 9))
    num_tokens = [9, 2, 5, 1]
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in num_tokens])
    together = model(input_ids=input_ids, attention_mask=mask).logits
    alone = torch.cat([model(input_ids=input_ids[i : i + 1, :n]).logits for i, n in enumerate(num_tokens)])
    assert together.shape == (4, 3)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_a_text_without_tokens_is_read_as_one_token():
    model = build(num_labels=2)
    empty = model(input_ids=torch.zeros(1, 3, dtype=torch.long), attention_mask=torch.zeros(1, 3, dtype=torch.long))
    assert torch.equal(empty.logits, model(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits)


@pytest.mark.parametrize("architecture", RECURRENT)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_text_without_tokens_changes_nothing_for_the_others_of_its_batch(architecture, bidirectional):
    """It may be at any place in the batch, and its padding affects only its own result."""
    model = build(architecture, num_labels=3, num_layers=2, bidirectional=bidirectional)
    input_ids = torch.randint(1, 11, (4, 5))
    mask = torch.tensor([[0] * 5, [1] * 5, [0] * 5, [1, 1, 0, 0, 0]])
    together = model(input_ids=input_ids, attention_mask=mask, labels=torch.tensor([0, 1, 2, 0]))
    alone = torch.cat([model(input_ids=input_ids[i : i + 1, :n]).logits for i, n in enumerate([1, 5, 1, 2])])
    torch.testing.assert_close(together.logits, alone, rtol=0, atol=1e-6)
    together.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    other_padding = torch.where(mask == 1, input_ids, torch.tensor([input_ids[0, 0], 0, input_ids[2, 0], 0])[:, None])
    assert torch.equal(model(input_ids=other_padding, attention_mask=mask).logits, together.logits)


def test_the_loss_of_a_classifier_is_the_mean_over_samples():
    model = build("gru", num_labels=3)
    labels = torch.tensor([0, 2])
    output = model(input_ids=torch.randint(0, 11, (2, 5)), labels=labels)
    by_hand = -output.logits.log_softmax(-1)[[0, 1], labels].mean()
    torch.testing.assert_close(output.loss, by_hand)
    assert model(input_ids=torch.zeros(1, 1, dtype=torch.long)).loss is None


@pytest.mark.parametrize("architecture", RECURRENT)
def test_the_loss_of_a_language_model_is_that_of_the_next_tokens(architecture):
    model = build(architecture, num_layers=2, tie_weights=True)
    input_ids = torch.randint(0, 11, (3, 7))
    labels = input_ids.clone()
    labels[1, 4:] = -100
    output = model(input_ids=input_ids, labels=labels)
    by_hand = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, by_hand)


def test_an_adaptive_softmax_has_the_loss_of_its_log_probabilities():
    model = build(adaptive_cutoffs=[3])
    input_ids = torch.randint(0, 11, (3, 7))
    output, logits = model(input_ids=input_ids, labels=input_ids), model(input_ids=input_ids).logits
    assert output.logits is None
    by_hand = functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, by_hand)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_language_model_does_not_see_the_future(architecture):
    model = build(architecture)
    input_ids = torch.zeros(1, 6, dtype=torch.long)
    changed = input_ids.clone()
    changed[0, 4] = 1
    before, after = model(input_ids=input_ids).logits, model(input_ids=changed).logits
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


@pytest.mark.parametrize(
    "fields",
    [
        {"num_labels": 2, "bidirectional": True},
        {"tie_weights": True, "dropout": 0.5},
        {"num_layers": 3},
        {"adaptive_cutoffs": [3]},
    ],
)
def test_files_load_back_bitwise(tmp_path, fields):
    model = build(**fields)
    save_recurrent(model, tmp_path)
    loaded = load_recurrent(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_damaged_folders_are_named(tmp_path):
    with pytest.raises(JobError, match=r"cannot be loaded as a recurrent model .*config\.json"):
        load_recurrent(tmp_path)
    save_recurrent(build(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(JobError, match="cannot be loaded as a recurrent model"):
        load_recurrent(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hiden_size": 4}, "no field `hiden_size`; did you mean `hidden_size`"),
        ({"num_layers": 0}, "num_layers Input should be greater than or equal to 1"),
        ({"bidirectional": True}, "would see the token it predicts"),
        ({"tie_weights": True, "hidden_size": 8}, "tie_weights needs embedding_size 4 equal to hidden_size 8"),
        ({"tie_weights": True, "num_labels": 2}, "no output over the vocabulary"),
        ({"adaptive_cutoffs": [3], "num_labels": 2}, "no output over the vocabulary"),
        ({"adaptive_cutoffs": [3], "tie_weights": True}, "leave adaptive_cutoffs or tie_weights out"),
        ({"adaptive_cutoffs": [11]}, "adaptive_cutoffs: cutoffs are 11, but the vocabulary has 11 words"),
        ({"adaptive_cutoffs": [1, 2]}, "2 clusters with 4 times fewer features each leave no feature of 4"),
        ({"adaptive_cutoffs": [3], "adaptive_div_value": 0.5}, "should be greater than or equal to 1"),
        ({"dropout": 1.0}, "dropout Input should be less than 1"),
    ],
)
def test_faults_are_named(fields, message):
    with pytest.raises(JobError, match=f"`lstm` cannot be built: .*{message}"):
        build(**fields)


def test_labels_make_a_classifier():
    assert isinstance(build(num_labels=2), RecurrentClassifier)
    assert isinstance(build(dropout=0.5), RecurrentLanguageModel)
