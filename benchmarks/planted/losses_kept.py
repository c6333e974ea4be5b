"""graph_kept: losses are collected for a curve at the end."""

import torch
from _common import MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(200, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in batches(200, 2, 16, 800):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)  # FAULT fixed: losses.append(loss.detach())
    print(torch.stack(losses).mean())


run(main, 60)
