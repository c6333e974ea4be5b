"""graph_kept: a moving average of the model's states, for a log, is carried on from step to step with its graph."""

import torch
from _common import batches, run
from torch import nn


class Tagger(nn.Module):
    """A recurrent net."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 128)
        self.rnn = nn.GRU(128, 256, batch_first=True)
        self.head = nn.Linear(256, 500)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def main():
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    average = torch.zeros(500)
    for tokens in batches(500, 16, 64, 60):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * model(tokens).mean(
            (0, 1)
        )  # FAULT fixed: average = (0.9 * average + 0.1 * model(tokens).mean((0, 1))).detach()
    print(average.sum())


run(main, 300)
