"""Recurrent taggers: padding changes nothing, the loss is the hand-written one, and files load back bitwise."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from plimsoll.errors import JobError
from plimsoll.models.names import RECURRENT
from plimsoll.models.recurrent.model import build_recurrent, load_recurrent, save_recurrent

SMALL = {"vocab_size": 11, "num_labels": 3, "embedding_size": 4, "hidden_size": 5}


def build(architecture="lstm", **fields):
    torch.manual_seed(0)
    return build_recurrent({"architecture": architecture, "is_tagger": True, **SMALL, **fields})


def padded_batch():
    input_ids = torch.randint(1, 11, (4, 9))
    num_tokens = [9, 2, 5, 1]
    return input_ids, num_tokens, torch.tensor([[1] * n + [0] * (9 - n) for n in num_tokens])


@pytest.mark.parametrize("architecture", RECURRENT)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_tagger_does_not_see_padding(architecture, bidirectional):
    model = build(architecture, num_layers=2, bidirectional=bidirectional)
    input_ids, num_tokens, mask = padded_batch()
    together = model(input_ids=input_ids, attention_mask=mask).logits
    assert together.shape == (4, 9, 3)
    for row, num in enumerate(num_tokens):
        alone = model(input_ids=input_ids[row : row + 1, :num]).logits[0]
        torch.testing.assert_close(together[row, :num], alone, rtol=0, atol=1e-6)


class Plain(nn.Module):
    """The hand-written tagger."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.recurrent = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)


def test_loss_and_gradients_are_those_of_a_tagger_by_hand():
    model, plain = build(bidirectional=True), Plain()
    plain.load_state_dict(model.state_dict())
    input_ids, num_tokens, mask = padded_batch()
    labels = torch.randint(0, 3, (4, 9)).masked_fill(mask == 0, -100)
    labels[0, ::2] = -100
    model(input_ids=input_ids, attention_mask=mask, labels=labels).loss.backward()
    losses = []
    for row, num in enumerate(num_tokens):  # one by one: no padding at all
        hidden, _ = plain.recurrent(plain.embedding(input_ids[row : row + 1, :num]))
        losses.append(functional.cross_entropy(plain.head(hidden)[0], labels[row, :num], reduction="sum"))
    loss = sum(losses) / int((labels != -100).sum())
    loss.backward()
    torch.testing.assert_close(model(input_ids, mask, labels).loss, loss)
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad)


def test_a_sample_without_tokens_or_labels_is_harmless():
    output = build()(input_ids=torch.zeros(1, 3, dtype=torch.long), attention_mask=torch.zeros(1, 3, dtype=torch.long))
    assert (output.loss, output.logits.shape) == (None, (1, 3, 3))


def test_files_load_back_bitwise_with_the_names_of_the_labels(tmp_path):
    model = build("gru", num_layers=2, label_names=("B", "I", "O"))
    save_recurrent(model, tmp_path)
    loaded = load_recurrent(tmp_path)
    assert loaded.config == model.config
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_tagger_needs_labels():
    with pytest.raises(JobError, match="is_tagger True needs num_labels"):
        build_recurrent({"architecture": "lstm", "vocab_size": 11, "is_tagger": True})
