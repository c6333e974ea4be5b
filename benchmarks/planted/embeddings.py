"""embeddings: a table of a vocabulary of which the corpus uses a part, with its dense gradient and states."""

import torch
from _common import batches, run
from torch import nn


def main():
    model = nn.Sequential(
        nn.EmbeddingBag(120_000, 128), nn.Linear(128, 4)
    )  # FAULT fixed: model = nn.Sequential(nn.EmbeddingBag(8_000, 128), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for tokens in batches(8_000, 16, 64, 5):
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 200)
