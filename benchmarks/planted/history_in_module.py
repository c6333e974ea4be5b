"""graph_kept: a module keeps its hidden states in an attribute, for a plot."""

import torch
from _common import MiniGPT, batches, next_token_loss, run
from torch import nn


class Watched(nn.Module):
    """A model that notes its hidden states."""

    def __init__(self):
        super().__init__()
        self.model = MiniGPT(500, 128, 2)
        self.history = []

    def forward(self, tokens):
        hidden = self.model.embedding(tokens)
        for block in self.model.blocks:
            hidden = block(hidden)
            self.history.append(hidden)  # FAULT fixed: self.history.append(hidden.norm().item())
        return self.model.head(hidden)


def main():
    model = Watched()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches(500, 16, 64, 200):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 300)
