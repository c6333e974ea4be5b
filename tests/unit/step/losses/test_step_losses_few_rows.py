"""A check of a training with a few samples, for losses whose embeddings are computed in slices. It changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embedders import CASES, Encoder, batches, fresh, tied
from plimsoll.models.workload import Workload
from plimsoll.planning.constraints import setting_of
from plimsoll.planning.inputs import StepInput
from plimsoll.step.losses.few_rows import ask_few_rows
from plimsoll.techniques import technique_of
from plimsoll.techniques.gradient_cache import gradient_cache_choice, refusal_of


class Centered(Encoder):
    """An encoder that subtracts a little of the batch mean from its embeddings."""

    def forward(self, ids):
        embeddings = super().forward(ids)
        return embeddings - 0.01 * embeddings.mean(0)


def workload_of(model, loss=tied):
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, "samples")


def why_not_in_slices(workload, batch):
    return ask_few_rows(workload, batch, refusal_of)


@pytest.mark.parametrize("name", CASES)
def test_it_can_be(name):
    if name == "statistics":
        pytest.skip("its loss is of ten samples: with eight nothing can be told")
    model = fresh(CASES[name], dropout=0.1)
    before = torch.get_rng_state()
    assert why_not_in_slices(workload_of(model, CASES[name].loss), batches(1)[0]) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_why_it_cannot_be():
    assert "does not compute each row by itself" in why_not_in_slices(workload_of(Centered()), batches(1)[0])

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(nn.Embedding(30, 3))

        def forward(self, ids):
            rows = self.parts[0](ids).mean(1)
            return rows @ rows.T

    of_scores = workload_of(Scores(), lambda model, batch: model(batch["query"]).softmax(-1).square().sum())
    assert why_not_in_slices(of_scores, batches(1)[0]) == (
        "no module of Scores returns one row for each input row, as an encoder does"
    )


def test_nothing_is_told_of_what_cannot_be_tried():
    with torch.device("meta"):
        model = Centered()
    assert why_not_in_slices(workload_of(model), batches(1)[0]) is None
    assert why_not_in_slices(workload_of(Centered()), batches(1, num_samples=1)[0]) is None


@pytest.mark.parametrize(("build", "reason"), [(Encoder, None), (Centered, "does not compute each row by itself")])
def test_techniques_are_told(build, reason):
    model = build()
    planning_input = StepInput(
        model, torch.optim.SGD(model.parameters()), batches(1)[0], tied, "samples", None, "fp32", frozenset()
    )
    available = technique_of("gradient_cache").choices(planning_input.workload, setting_of(planning_input, "cpu"))
    assert available == (gradient_cache_choice(3), gradient_cache_choice(1)) if reason is None else reason in available
