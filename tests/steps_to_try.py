"""Steps of models with a controlled duration, for trials of plans."""

from __future__ import annotations

import torch
from torch import nn

from plimsoll.step.train_step import TrainStep
from workloads import BATCH_SIZE


class Paced(nn.Module):
    """Sleeps in each pass of fewer samples than a given number."""

    def __init__(self, least=BATCH_SIZE):
        super().__init__()
        self.head, self.least = nn.Linear(4, 1), least
        self.ballast = torch.ones(500, 500)

    def forward(self, inputs):
        if len(inputs) < self.least:
            self.ballast @ self.ballast
        return self.head(inputs).mean()


def paced(**options):
    torch.manual_seed(0)
    model = Paced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fallbacks = options.pop("fallbacks")
    return TrainStep(
        model, optimizer, lambda model, batch: model(batch), units="samples", fallbacks=fallbacks, **options
    )


BATCH = torch.ones(BATCH_SIZE, 4)
