"""graph_kept: the outputs of every step are collected for an accuracy."""

import torch
from _common import MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(2000, 64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outputs = []
    for tokens in batches(2000, 8, 64, 100):
        logits = model(tokens)
        loss = next_token_loss(logits, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(logits)  # FAULT fixed: outputs.append((logits.argmax(-1) == tokens).sum().item())
    print(len(outputs))


run(main, 300)
