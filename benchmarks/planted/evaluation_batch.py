"""evaluation_keeps_graphs: the evaluation takes larger batches and has no no_grad."""

import torch
from _common import MiniGPT, batches, next_token_loss, run


def count(model, tokens):
    return (model(tokens).argmax(-1)[:, :-1] == tokens[:, 1:]).sum().item()  # ALSO evaluation_batch


def main():
    model = MiniGPT(500, 128, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches(500, 4, 64, 3):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    for tokens in batches(500, 64, 64, 3):
        right += count(model, tokens)  # FAULT fixed: right += torch.no_grad()(count)(model, tokens)
    print(right)


run(main, 300)
