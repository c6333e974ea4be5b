"""Small trainings with and without replays, and the properties that must be equal."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from plimsoll.errors import PlimsollWarning
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.train_step import TrainStep

GRAPH = Choice(technique="cuda_graph")
CHECKPOINTING = Choice(technique="checkpointing", options={"blocks": "all"})
NUM_STEPS = 4
WIDTH = 16  # of a sample; then a micro-batch has the memory layout of a separate batch


class Net(nn.Module):
    """Two blocks with dropout and BatchNorm; ``between`` is called in its forward."""

    def __init__(self, dropout=0.1, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout))
        self.head, self.between = nn.Linear(16, 3), [between]

    def forward(self, x):
        return self.head(self.between[0](self.body(x)))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def batches(num_samples=8, num_steps=NUM_STEPS, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(num_samples, WIDTH, generator=generator).to(device),
            "y": torch.randint(3, (num_samples,), generator=generator).to(device),
        }
        for _ in range(num_steps)
    ]


def trained(
    net, *more, micro_batch=3, loss=loss_of, data=None, between_steps=lambda step: None, device="cpu", **options
):
    """Train a copy; return losses, the model's state, the number of replays, and why nothing was replayed."""
    torch.manual_seed(1)
    random.seed(1)
    model = copy.deepcopy(net).to(device).train()
    step = TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss, units="samples", clip_norm=1.0,
        fallbacks=[(micro_batch_choice(micro_batch), *more)], recut_batch_norm=True, recut_loss=True, **options,
    )  # fmt: skip
    losses = []
    for batch in data or batches():
        losses.append(step(batch).loss)
        between_steps(step)
    found = losses, {name: one.clone() for name, one in model.state_dict().items()}, step.replays
    step.close()
    return found


def require_the_same_bits(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(one, expected[1][name]) for name, one in found[1].items())


def both(net, *more, **options):
    """Train with replays and without, and check that the results are equal."""
    expected, found = trained(net, *more, **options), trained(net, *more, GRAPH, **options)
    require_the_same_bits(found, expected)
    return found[2]


def refused(net, **options):
    """Train without possible replays; return the reason, which is reported once."""
    expected = trained(net, **options)
    with pytest.warns(PlimsollWarning, match="not replayed as a CUDA graph") as said:
        found = trained(net, GRAPH, **options)
    assert len([one for one in said if issubclass(one.category, PlimsollWarning)]) == 1
    require_the_same_bits(found, expected)
    assert found[2].num_replays == 0
    return found[2].why_not
