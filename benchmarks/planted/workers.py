"""workers: each worker of the loader keeps all decoded samples."""

import torch
from _common import MiniGPT, next_token_loss, run
from torch.utils.data import DataLoader, Dataset


class Decoded(Dataset):
    """Samples that are decoded once."""

    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = torch.full((100_000,), index % 500)
        return self.cache[index][:32]


def main():
    model = MiniGPT(500, 64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.multiprocessing.set_sharing_strategy("file_system")
    loader = DataLoader(
        Decoded(), batch_size=8, num_workers=2
    )  # FAULT fixed: loader = [torch.randint(0, 500, (8, 32)) for _ in range(20)]
    for tokens in loader:
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


run(main, 200)
