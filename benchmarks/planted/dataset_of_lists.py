"""dataset_in_ram: a Dataset of lists of numbers leaves too little for the training."""

import numpy
import torch
from _common import MiniGPT, next_token_loss, run
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    """Lists of numbers."""

    def __init__(self, number, length):
        generator = numpy.random.default_rng(0)
        rows = (generator.integers(0, 2000, length).astype(numpy.int16) for _ in range(number))
        self.rows = [row.tolist() for row in rows]  # FAULT fixed: self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index], dtype=torch.long)


def main():
    model = MiniGPT(2000, 128, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Tokens(60_000, 128), batch_size=8)
    for number, tokens in enumerate(loader):
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number == 5:
            break


run(main, 340)
