"""optimizer_states: two moments of every parameter of a model that fits without them."""

import torch
from _common import MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(1000, 384, 8)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-3, foreach=False
    )  # FAULT fixed: optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3, foreach=False)
    for tokens in batches(1000, 2, 16, 3):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 190)
