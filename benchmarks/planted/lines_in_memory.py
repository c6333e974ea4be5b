"""dataset_in_ram: a corpus is read and cut into numbers before the training begins."""

import random

import numpy
import torch
from _common import MiniGPT, next_token_loss, run


def write_corpus():
    with open("corpus.txt", "w") as file:
        for _ in range(150_000):
            file.write(" ".join(str(random.randrange(500)) for _ in range(32)) + "\n")


def main():
    model = MiniGPT(500, 64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = []
    with open("corpus.txt") as file:
        for line in file:
            samples.append(
                [float(word) for word in line.split()]
            )  # FAULT fixed: samples.append(numpy.array(line.split(), dtype=numpy.uint16))
    for start in range(0, 64, 8):
        tokens = torch.tensor(numpy.array(samples[start : start + 8])).long()
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


write_corpus()
run(main, 120)
