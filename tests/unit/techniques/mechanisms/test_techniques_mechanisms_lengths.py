"""The grouping of samples by length, and the columns that are cut off; numbers by hand."""

import pytest
import torch
from transformers import BatchEncoding

from plimsoll.techniques.mechanisms.lengths import groups_by_length, lengths_of, trimmed


def batch_of(lengths, num_columns=16, **fields):
    mask = (torch.arange(num_columns) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask, "labels": torch.arange(len(lengths))} | fields


def test_a_budget_of_elements_is_filled_with_more_of_the_shorter_ones():
    # A sample of 16 has 2 x 16 + 1 = 33 elements, so two have 66; of 8 columns, 17 each, 3 fit.
    groups = groups_by_length(batch_of([8, 16, 4, 8, 16, 3, 9]), num_samples=2)
    assert groups == [([1, 4], 16), ([6, 0, 3], 9), ([2, 5], 4)]


def test_very_short_samples_count_as_eight_columns():
    groups = groups_by_length(batch_of([1] * 40, num_columns=32), num_samples=4)  # 4 x 65 elements, 17 each
    assert [len(numbers) for numbers, _ in groups] == [15, 15, 10]
    assert {num_columns for _, num_columns in groups} == {1}


def test_full_samples_are_cut_as_any_batch_and_in_their_order():
    assert groups_by_length(batch_of([16] * 5), 2) == [([0, 1], 16), ([2, 3], 16), ([4], 16)]
    assert groups_by_length(batch_of([9, 3, 5]), 3) == [(range(3), 9)]


def test_a_sample_of_nothing_but_padding_keeps_it_and_a_hole_is_inside():
    batch = batch_of([16, 0, 5])
    batch["attention_mask"][2, 1] = 0
    assert lengths_of(batch) == [16, 16, 5]


def test_padding_on_the_left_stays():
    batch = batch_of([3, 16])
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    assert lengths_of(batch) == [16, 16]


def test_a_label_beyond_the_mask_is_inside():
    labels = torch.full((2, 16), -100)
    labels[0, 11] = 1
    assert lengths_of(batch_of([3, 5], labels=labels)) == [12, 5]


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2, 4),
        {"input_ids": torch.ones(2, 4)},
        batch_of([3, 5], attention_mask=torch.ones(2, 1, 16, 16)),
        batch_of([3, 5], pixels=torch.ones(2, 3, 16)),
        batch_of([3, 5], words=[["a"], ["b"]]),
    ],
    ids=["a tensor", "no mask", "another mask", "another field of so many columns", "lists"],
)
def test_what_is_not_known_is_not_guessed(batch):
    assert lengths_of(batch) is None
    assert groups_by_length(batch, 1) is None


def test_fields_along_time_are_trimmed_and_the_others_and_the_batch_itself_stay():
    fields = {
        "labels": torch.full((2, 16), -100),
        "token_type_ids": torch.zeros(2, 16),
        "position_ids": torch.arange(16).repeat(2, 1),
        "decoder_input_ids": torch.ones(2, 5),
        "weight": torch.ones(2),
    }
    batch = BatchEncoding(batch_of([3, 5], **fields))
    cut = trimmed(batch, 5)
    assert isinstance(cut, BatchEncoding)
    along_time = ("input_ids", "attention_mask", "labels", "token_type_ids", "position_ids")
    assert {name: tuple(value.shape) for name, value in cut.items()} == dict.fromkeys(along_time, (2, 5)) | {
        "decoder_input_ids": (2, 5),
        "weight": (2,),
    }
    assert all(value.is_contiguous() for value in cut.values())
    assert batch["input_ids"].shape == (2, 16)
    assert trimmed(batch, 16) is batch
