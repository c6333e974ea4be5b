"""optimizer_temporaries: torch's foreach update computes with copies of all parameters at once."""

import torch
from _common import MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(1000, 384, 8)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, foreach=True
    )  # FAULT fixed: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for tokens in batches(1000, 2, 16, 3):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 317)
