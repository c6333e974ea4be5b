"""Batches that must stay whole: if micro-batches would change the gradients, they are refused."""

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, conflict_among, installed
from plimsoll.techniques.mechanisms.uncuttable import WholeBatch, counts_rows
from plimsoll.techniques.time_segments import time_segments_choice

FIELDS = {"architecture": "lstm", "vocab_size": 9, "embedding_size": 4, "hidden_size": 4}
IDS = torch.tensor([[1, 2, 1, 3, 1, 2], [1, 1, 2, 4, 4, 1]])
SETTING = Setting(
    "cpu", 2, allow=frozenset({"truncated_bptt", "by_length"}), lengths_vary=True, sequence_length=1000
)  # fmt: skip


def model_of(scaled=True):
    torch.manual_seed(0)
    model = build_recurrent(FIELDS)
    model.embedding.scale_grad_by_freq = scaled
    return model


def workload_of(model):
    return Workload(model, torch.optim.SGD(model.parameters()), model_loss, "next-tokens")


def step_of(model, **options):
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), units="next-tokens", **options)


def moved(model, *batches):
    """Return the gradient of an embedding after plain accumulation."""
    for ids in batches:
        (model(ids, labels=ids).loss / len(batches)).backward()
    return model.embedding.weight.grad


def test_plain_accumulation_itself_changes_gradients_that_are_scaled_by_what_is_in_a_pass():
    torch.testing.assert_close(moved(model_of(scaled=False), IDS), moved(model_of(scaled=False), IDS[:1], IDS[1:]))
    assert (moved(model_of(), IDS) - moved(model_of(), IDS[:1], IDS[1:])).abs().max() > 0.001


@pytest.mark.parametrize(
    "choice",
    [
        micro_batch_choice(1),
        time_segments_choice(2),
        Choice(technique="truncated_bptt", options={"steps": 2}),
        Choice(technique="by_length"),
    ],
    ids=lambda choice: choice.technique,
)
def test_no_technique_makes_other_gradients_of_it(choice):
    told = "an embedding with scale_grad_by_freq divides gradients by a row's count in a pass"
    assert told in TECHNIQUES[choice.technique].choices(workload_of(model_of()), SETTING)
    assert told in conflict_among((choice,), workload_of(model_of()), SETTING)
    assert conflict_among((choice,), workload_of(model_of(scaled=False)), SETTING) is None
    frozen = model_of()
    frozen.embedding.weight.requires_grad_(False)
    assert conflict_among((choice,), workload_of(frozen), SETTING) is None


@pytest.mark.parametrize("technique", ["time_segments", "truncated_bptt"])
def test_installing_what_cuts_time_is_refused(technique):
    choice = Choice(technique=technique, options={"steps": 2})
    with pytest.raises(InputError, match="leave scale_grad_by_freq out of the model"):
        installed(workload_of(model_of()), [choice]).__enter__()


def test_an_embedding_beside_the_layers_that_are_cut_is_not_cut():
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.LSTM(4, 4))
    assert conflict_among((time_segments_choice(2),), workload_of(model), SETTING) is None


def test_a_step_keeps_its_batch_whole_also_when_memory_runs_out():
    batch = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(InputError, match=r"would cut the batch of 2 samples, but an embedding .*: give micro_batch=No"):
        step_of(model_of(), micro_batch=1)(batch)
    model = model_of()
    with armed("forward", 1, 2), pytest.raises(OutOfMemoryError, match=r"2 samples was not cut, because an embedding"):
        step_of(model)(batch)
    before = model.embedding.weight.detach().clone()
    result = step_of(model)(batch)
    assert result.micro_batch == 2
    torch.testing.assert_close(before - model.embedding.weight, moved(model_of(), IDS))


def test_batch_norm_keeps_a_batch_whole_in_training_unless_it_is_allowed():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    workload = Workload(model, torch.optim.SGD(model.parameters()), model_loss, "samples")
    assert str(WholeBatch(workload, recut_batch_norm=False).reason()).startswith("BatchNorm's statistics depend on")
    assert WholeBatch(workload, recut_batch_norm=True).reason() is None
    model.eval()
    assert WholeBatch(workload, recut_batch_norm=False).reason() is None
    assert WholeBatch(workload, recut_batch_norm=False).reason(also_idle=True) is not None
    workload.model = nn.Linear(2, 2)
    assert WholeBatch(workload, recut_batch_norm=False).reason() is None


def test_bags_count_too():
    assert counts_rows(nn.EmbeddingBag(3, 2, scale_grad_by_freq=True)) is not None
    assert counts_rows(nn.EmbeddingBag(3, 2)) is None
