"""evaluation_keeps_graphs: the scores of all classes of all batches are collected."""

import torch
from _common import MiniGPT, batches, run


def main():
    model = MiniGPT(2000, 64, 2)
    model.eval()
    predictions = []
    with torch.no_grad():
        for tokens in batches(2000, 8, 64, 120):
            logits = model(tokens)
            predictions.append(logits)  # FAULT fixed: predictions.append((logits.argmax(-1) == tokens).sum().item())
    print(len(predictions))


run(main, 300)
