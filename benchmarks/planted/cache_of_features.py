"""leak: features of every batch are cached and never read again."""

import torch
from _common import MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(500, 128, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cache = {}
    for step, tokens in enumerate(batches(500, 16, 64, 400)):
        with torch.no_grad():
            features = model.embedding(tokens)
        cache[step] = features  # FAULT fixed: cache[step % 4] = features
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 200)
