"""logits: the scores of a large vocabulary at every position."""

import torch
from _common import MiniGPT, batches, next_token_loss, run
from torch.utils.checkpoint import checkpoint


def chunked_loss(model, tokens):
    hidden = model.embedding(tokens)
    for block in model.blocks:
        hidden = block(hidden)
    parts = zip(hidden[:, :-1].split(1), tokens[:, 1:].split(1), strict=True)
    losses = [checkpoint(part_loss, model.head, one, own, use_reentrant=False) for one, own in parts]
    return torch.stack(losses).mean()


def part_loss(head, hidden, tokens):
    return torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens.flatten())


def main():
    model = MiniGPT(20_000, 64, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for tokens in batches(20_000, 16, 128, 3):
        loss = next_token_loss(model(tokens), tokens)  # FAULT fixed: loss = chunked_loss(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 400)
