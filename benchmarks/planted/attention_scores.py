"""attention_scores: attention is written out, and the texts are long."""

import torch
from _common import Block, MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(500, 64, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    Block.fused = False  # FAULT fixed: Block.fused = True
    for tokens in batches(500, 2, 1024, 3):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 120)
