"""Batches sized by predicted memory: each entry fits, and one more sample does not."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import plimsoll
from plimsoll.errors import BudgetError, InputError
from plimsoll.planning.rows_by_length import rows_by_length

LONGEST = 64


@pytest.fixture
def training():
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LONGEST,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    return model, torch.optim.AdamW(model.parameters())


def batch_of(num_samples: int, length: int):
    input_ids = torch.ones(num_samples, length, dtype=torch.int64)
    labels = torch.zeros(num_samples, dtype=torch.int64)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


def needs_bytes(training, num_samples: int, length: int) -> int:
    prediction = plimsoll.predict(*training, batch_of(num_samples, length), units="samples", device="rtx3060")
    return prediction.peak.high_bytes


@pytest.mark.long
def test_each_entry_fits_and_one_sample_more_does_not(training):
    budget = needs_bytes(training, 40, LONGEST)
    rows = rows_by_length(
        *training, batch_of(2, LONGEST), lengths=[LONGEST, 16], budget=budget, units="samples", device="rtx3060"
    )
    assert list(rows) == [16, LONGEST]
    assert rows[16] > 2 * rows[LONGEST] >= 80
    for length, num_rows in rows.items():
        assert (
            needs_bytes(training, num_rows, length) <= budget < needs_bytes(training, 1 + int(num_rows * 1.01), length)
        )


def test_what_cannot_be_is_said_in_numbers(training):
    with pytest.raises(BudgetError, match=r"one sample of 64 tokens needs .* MiB, but the budget leaves .* MiB: give"):
        rows_by_length(*training, batch_of(2, LONGEST), lengths=[LONGEST], budget="1MiB", device="rtx3060")
    for lengths in ([], [0], [65]):
        with pytest.raises(InputError, match="are not all from 1 to 64, the tokens of a sample of the batch: give"):
            rows_by_length(*training, batch_of(2, LONGEST), lengths=lengths, budget="1GiB")
    without_mask = {"input_ids": torch.ones(2, LONGEST, dtype=torch.int64)}
    with pytest.raises(
        InputError, match="cannot tell which fields of the batch have a time dimension, of input_ids: give one with"
    ):
        rows_by_length(*training, without_mask, lengths=[8], budget="1GiB")


def test_no_more_rows_are_looked_for_than_is_said_and_the_shortest_sample_has_one_token(training):
    batch = batch_of(2, LONGEST)
    rows = rows_by_length(*training, batch, lengths=[LONGEST, 1], budget="4GiB", most_rows=3, device="rtx3060")
    assert rows == {1: 3, LONGEST: 3}
