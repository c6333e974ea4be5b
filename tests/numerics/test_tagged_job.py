"""A step of a tagger's job against plain PyTorch written by hand: files, words, windows, labels, loss and update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from plimsoll.data.prepare import prepare
from plimsoll.data.tokens.tokenizer import open_tokenizer
from plimsoll.models.assemble import assemble
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.job_step import step_of
from tagged_files import LSTM, Sentence, conll, sentences_of_names

LENGTH, STRIDE, BATCH, LEARNING_RATE = 6, 4, 9, 0.5
TAGS = ["B-NAME", "I-NAME", "O"]


def windows_by_hand(sentence: Sentence) -> list[tuple[list[str], list[int]]]:
    """Return words and labels per window; a shared word has its label in the window whose edge is farther away."""
    windows, begin = [], 0
    while True:
        end = min(begin + LENGTH, len(sentence))
        first = begin + (LENGTH - STRIDE) // 2 if begin else 0
        last = end if end == len(sentence) else end - (LENGTH - STRIDE) // 2
        labels = [
            TAGS.index(tag) if first <= begin + place < last else -100
            for place, (_, tag) in enumerate(sentence[begin:end])
        ]
        windows.append(([word for word, _ in sentence[begin:end]], labels))
        if end == len(sentence):
            return windows
        begin += STRIDE


class Plain(nn.Module):
    """The tagger, written by hand."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 24)
        self.recurrent = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 3)


@pytest.mark.parametrize("micro_batch", [BATCH, 2])
@pytest.mark.parametrize("others", [(), (Choice(technique="by_length"),)], ids=["plain", "by_length"])
def test_a_step_is_that_of_a_tagger_by_hand(tmp_path: Path, micro_batch: int, others: tuple[Choice, ...]):
    sentences = sentences_of_names(30)
    (tmp_path / "names.conll").write_text(conll(sentences))
    job = Job.from_fields(
        {
            "model": LSTM, "task": "token-classification", "sequence_length": LENGTH, "batch_size": BATCH,
            "data": {"train": str(tmp_path / "names.conll"), "stride": STRIDE, "order": "as_is"},
            "tokenizer": {"train": "words", "vocab_size": 100}, "optimizer": {"name": "sgd", "lr": LEARNING_RATE},
        }
    )  # fmt: skip
    prepared = prepare(job, tmp_path / "cache")
    parts = assemble(job, prepared, "cpu")
    plain = Plain(prepared.vocab_size)
    plain.load_state_dict(parts.model.state_dict())
    step = step_of(job, parts.model, parts.optimizer, [(micro_batch_choice(micro_batch), *others)])
    result = step(parts.loader.peek().fields)

    numbers = open_tokenizer(Path(prepared.tokenizer_folder)).backend.get_vocab()
    windows = [window for sentence in sentences for window in windows_by_hand(sentence)][:BATCH]
    losses = []
    for words, labels in windows:
        hidden, _ = plain.recurrent(plain.embedding(torch.tensor([[numbers[word] for word in words]])))
        losses.append(functional.cross_entropy(plain.head(hidden)[0], torch.tensor(labels), reduction="sum"))
    num_labels = sum(label >= 0 for _, labels in windows for label in labels)
    loss = sum(losses) / num_labels
    loss.backward()
    assert result.num_units == num_labels
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    updated = dict(parts.model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(updated[name], parameter - LEARNING_RATE * parameter.grad, rtol=1e-4, atol=1e-6)
