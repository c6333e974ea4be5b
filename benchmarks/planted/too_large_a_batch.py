"""true_capacity: nothing is wrong but the size of the batch."""

import torch
from _common import run
from torch import nn


def main():
    layers = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = (
            model(torch.randn(4096, 512)).square().mean()
        )  # FAULT fixed: loss = model(torch.randn(512, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 130)
