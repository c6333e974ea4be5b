"""Batches are cut without losing, repeating or copying anything, and bytes are those of real tensors."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from plimsoll.errors import InputError
from plimsoll.models.workload import (
    batch_size_of,
    count_elements,
    count_units,
    move_batch,
    pick_samples,
    resident_bytes,
    split_batch,
)
from plimsoll.records.job import OptimizerChoice


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


def test_pieces_hold_every_sample_once_and_in_order():
    batch = text_batch()
    pieces = split_batch(batch, 2)
    assert [batch_size_of(piece) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), batch["input_ids"])
    assert [text for piece in pieces for text in piece["texts"]] == batch["texts"]
    assert np.concatenate([piece["weights"] for piece in pieces]).tolist() == [0, 1, 2, 3, 4]
    assert all(piece["name"] == "a batch" and piece["extra"] is None and piece["temperature"] == 2 for piece in pieces)


def test_pieces_are_views_of_the_batch():
    batch = text_batch()
    pieces = split_batch(batch, 2)
    assert pieces[1]["input_ids"].data_ptr() == batch["input_ids"].data_ptr() + 2 * 3 * 8
    assert pieces[0]["temperature"] is batch["temperature"]


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
    pieces = split_batch(batch, 2)
    assert [type(piece) for piece in pieces] == [type(batch)] * 2
    assert [batch_size_of(piece) for piece in pieces] == [2, 1]
    assert batch_size_of(batch) == 3


def test_a_piece_as_large_as_the_batch_is_one_piece():
    assert len(split_batch(text_batch(5), 5)) == 1
    assert len(split_batch(text_batch(5), 100)) == 1


def test_sizes_that_disagree_are_named():
    with pytest.raises(InputError, match=r"input_ids: 4, nested\.mask: 1\)"):
        split_batch({"input_ids": torch.zeros(4, 2), "nested": {"mask": torch.zeros(1, 4, 4)}}, 2)


def test_what_cannot_be_cut_is_named():
    with pytest.raises(InputError, match="field inner of a batch: a object is not"):
        batch_size_of({"input_ids": torch.zeros(2), "inner": object()})
    with pytest.raises(InputError, match="pieces of 0 samples"):
        split_batch(text_batch(), 0)
    with pytest.raises(InputError, match="holds no tensor"):
        batch_size_of({"name": "x", "scale": torch.tensor(1.0)})
    with pytest.raises(InputError, match=r"a batch of 0 samples \(a dict\)"):
        batch_size_of({"input_ids": torch.zeros(0, 4)})


def test_a_list_of_tensors_is_a_list_of_fields():
    """So tensors of one sample each are refused by their lengths, and where these agree nothing can be noticed."""
    with pytest.raises(InputError, match="0: 3, 1: 4"):
        split_batch([torch.zeros(3), torch.zeros(4)], 2)
    assert [[len(field) for field in piece] for piece in split_batch([torch.zeros(3)] * 2, 2)] == [[2, 2], [1, 1]]


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


def test_units_of_the_pieces_add_up():
    labels = torch.randint(0, 3, (7, 11)).masked_fill(torch.rand(7, 11) < 0.3, -100)
    for units in ("samples", "tokens", "next-tokens"):
        whole = count_units({"labels": labels}, units)
        assert sum(count_units(piece, units) for piece in split_batch({"labels": labels}, 3)) == whole


def test_a_batch_moves_with_its_structure():
    moved = move_batch({"pair": Pair(torch.zeros(2), torch.ones(2)), "texts": ["a", "b"]}, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].targets.device.type == "meta"
    assert moved["texts"] == ["a", "b"]


class Tied(nn.Module):
    """Parameters in float32: a 10 x 4 table used twice, a 4 x 4 map, and a frozen vector of 4."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)


def test_resident_bytes_by_hand():
    with torch.device("meta"):
        model = Tied()
    assert resident_bytes(model, OptimizerChoice(name="AdamW")) == {
        "parameters": (40 + 16 + 4) * 4,
        "gradients": (40 + 16) * 4,
        "optimizer_states": 2 * (40 + 16) * 4,
    }
    assert resident_bytes(model.half(), OptimizerChoice(name="sgd"))["parameters"] == (40 + 16 + 4) * 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Adadelta", {}),
        ("Adagrad", {}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("Adamax", {}),
        ("AdamW", {}),
        ("AdamW", {"amsgrad": True}),
        ("ASGD", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
    ],
)
def test_optimizer_states_are_those_a_real_step_allocates(name, arguments):
    model = nn.Linear(8, 8)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **arguments)
    predicted = resident_bytes(model, optimizer)["optimizer_states"]
    assert predicted == resident_bytes(model, OptimizerChoice(name=name, arguments=arguments))["optimizer_states"]
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert predicted == sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)


def test_states_of_other_optimizers_are_unknown():
    class AdamW(torch.optim.Optimizer):
        def step(self, closure=None):
            return None

    model = Tied()
    assert resident_bytes(model, AdamW(model.parameters(), {}))["optimizer_states"] is None
    assert resident_bytes(model, OptimizerChoice(name="adafactor"))["optimizer_states"] is None


def test_states_follow_the_groups_of_an_optimizer():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(2, 2, bias=False)
    groups = [{"params": first.parameters(), "momentum": 0.9}, {"params": second.parameters()}]
    states = resident_bytes(nn.Sequential(first, second), torch.optim.SGD(groups, lr=0.1))["optimizer_states"]
    assert states == 16 * 4
