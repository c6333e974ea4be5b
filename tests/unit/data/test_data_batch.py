"""Splitting of batches, which loses, repeats and copies nothing."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from plimsoll.data.batch import batch_size_of, count_elements, count_units, move_batch, pick_samples, split_batch
from plimsoll.errors import InputError


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


def text_batch(num_samples=5):
    return {
        "input_ids": torch.arange(num_samples * 3).reshape(num_samples, 3),
        "labels": torch.arange(num_samples),
        "texts": [f"text {i}" for i in range(num_samples)],
        "weights": np.arange(num_samples, dtype=np.float32),
        "temperature": torch.tensor(2.0),
        "name": "a batch",
        "extra": None,
    }


def test_samples_are_picked_by_their_number_from_every_field():
    picked = pick_samples(text_batch(), [4, 0])
    assert picked["input_ids"].tolist() == [[12, 13, 14], [0, 1, 2]]
    assert picked["texts"] == ["text 4", "text 0"]
    assert picked["weights"].tolist() == [4.0, 0.0]
    assert (picked["name"], picked["temperature"].item(), picked["extra"]) == ("a batch", 2.0, None)
    assert isinstance(pick_samples(Pair(torch.zeros(3), torch.ones(3)), [1]), Pair)


def test_micro_batches_have_every_sample_once_and_in_order():
    batch = text_batch()
    micro_batches = split_batch(batch, 2)
    assert [batch_size_of(micro_batch) for micro_batch in micro_batches] == [2, 2, 1]
    assert torch.equal(torch.cat([micro_batch["input_ids"] for micro_batch in micro_batches]), batch["input_ids"])
    assert [text for micro_batch in micro_batches for text in micro_batch["texts"]] == batch["texts"]
    assert np.concatenate([micro_batch["weights"] for micro_batch in micro_batches]).tolist() == [0, 1, 2, 3, 4]
    assert all(
        micro_batch["name"] == "a batch" and micro_batch["extra"] is None and micro_batch["temperature"] == 2
        for micro_batch in micro_batches
    )


def test_micro_batches_are_views_of_the_batch():
    batch = text_batch()
    micro_batches = split_batch(batch, 2)
    assert micro_batches[1]["input_ids"].data_ptr() == batch["input_ids"].data_ptr() + 2 * 3 * 8
    assert micro_batches[0]["temperature"] is batch["temperature"]


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).reshape(3, 2),
        (torch.arange(3), torch.arange(3)),
        [torch.arange(3), torch.arange(3)],
        Pair(torch.arange(3), torch.arange(3)),
        {"a": torch.arange(3), "nested": {"b": (torch.arange(3), torch.arange(3))}},
        OrderedDict(a=torch.arange(3)),
        BatchEncoding({"input_ids": torch.arange(3)}),
        BaseModelOutput(last_hidden_state=torch.arange(3)),
        [torch.arange(3), ("a", "b", "c")],
        {"texts": ["a", "b", "c"]},
        {"spans": [[1, 2], [], [3]]},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_type(batch):
    micro_batches = split_batch(batch, 2)
    assert [type(micro_batch) for micro_batch in micro_batches] == [type(batch)] * 2
    assert [batch_size_of(micro_batch) for micro_batch in micro_batches] == [2, 1]
    assert batch_size_of(batch) == 3


def test_a_micro_batch_as_large_as_the_batch_is_the_only_one():
    assert len(split_batch(text_batch(5), 5)) == 1
    assert len(split_batch(text_batch(5), 100)) == 1


def test_sizes_that_disagree_are_named():
    with pytest.raises(InputError, match=r"input_ids: 4, nested\.mask: 1\)"):
        split_batch({"input_ids": torch.zeros(4, 2), "nested": {"mask": torch.zeros(1, 4, 4)}}, 2)


def test_what_cannot_be_cut_is_named():
    with pytest.raises(InputError, match="field inner of a batch: a object is not"):
        batch_size_of({"input_ids": torch.zeros(2), "inner": object()})
    with pytest.raises(InputError, match="micro-batches of 0 samples"):
        split_batch(text_batch(), 0)
    with pytest.raises(InputError, match="holds no tensor"):
        batch_size_of({"name": "x", "scale": torch.tensor(1.0)})
    with pytest.raises(InputError, match=r"a batch of 0 samples \(a dict\)"):
        batch_size_of({"input_ids": torch.zeros(0, 4)})


def test_a_list_of_tensors_is_a_list_of_fields():
    """Each tensor of a list is a field with all samples.

    A list with one tensor per sample is refused if the lengths differ. If they are equal, the mistake cannot be
    detected.
    """
    with pytest.raises(InputError, match="0: 3, 1: 4"):
        split_batch([torch.zeros(3), torch.zeros(4)], 2)
    assert [[len(field) for field in micro_batch] for micro_batch in split_batch([torch.zeros(3)] * 2, 2)] == [
        [2, 2],
        [1, 1],
    ]


def test_elements_are_those_of_all_tensors():
    assert count_elements(text_batch()) == 5 * 3 + 5 + 1
    assert count_elements({"nested": (torch.ones(2, 3), [torch.ones(4)])}) == 10


def test_units_are_what_the_mean_loss_is_divided_by():
    labels = torch.tensor([[7, 8, -100], [-100, 9, 9]])
    batch = {"input_ids": torch.zeros(2, 3), "labels": labels}
    assert count_units(batch, "samples") == 2
    assert count_units(batch, "tokens") == 4
    assert count_units(batch, "next-tokens") == 3
    assert count_units(batch, lambda given: given["labels"].numel()) == 6


def test_tokens_cannot_be_counted_without_labels():
    with pytest.raises(InputError, match="without `labels`"):
        count_units((torch.zeros(2), torch.zeros(2)), "tokens")


def test_units_of_the_micro_batches_add_up():
    labels = torch.randint(0, 3, (7, 11)).masked_fill(torch.rand(7, 11) < 0.3, -100)
    for units in ("samples", "tokens", "next-tokens"):
        whole = count_units({"labels": labels}, units)
        assert sum(count_units(micro_batch, units) for micro_batch in split_batch({"labels": labels}, 3)) == whole


def test_a_batch_moves_with_its_structure():
    moved = move_batch({"pair": Pair(torch.zeros(2), torch.ones(2)), "texts": ["a", "b"]}, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].targets.device.type == "meta"
    assert moved["texts"] == ["a", "b"]
