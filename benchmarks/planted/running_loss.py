"""graph_kept: the loss of an epoch is added up with its graph; a second loss is not part of the backward pass."""

import torch
from _common import MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(2000, 128, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total_entropy = 0.0
    for tokens in batches(2000, 8, 64, 60):
        logits = model(tokens)
        loss = next_token_loss(logits, tokens)
        entropy = torch.distributions.Categorical(logits=model(tokens)).entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_entropy += entropy  # FAULT fixed: total_entropy += entropy.item()
    print(total_entropy)


run(main, 500)
