import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class QADataset(torch.utils.data.Dataset):
    def __init__(self, encodings, device):
        self.encodings = encodings
        self.device = device

    def __len__(self):
        return len(self.encodings["input_ids"])

    def __getitem__(self, idx):
        item = {k: torch.tensor(v[idx]).to(self.device) for k, v in self.encodings.items()}
        return item


class NLIDataset(Dataset):
    def __init__(self, csv):
        self.df = pd.read_csv(csv)

    def __len__(self):
        return len(self.df)

    def __getitem__(self, idx):
        row = self.df.iloc[idx]
        x = torch.tensor([ord(c) for c in row["premise"]], dtype=torch.long, device=DEVICE)
        return x, torch.tensor(int(row["label"]))


class HalfDataset(Dataset):
    def __init__(self, arr):
        self.arr = arr

    def __len__(self):
        return len(self.arr)

    def __getitem__(self, i):
        return torch.from_numpy(self.arr[i]).to(torch.float32), torch.tensor(1).to("cpu")


class ClassificationModule:
    def __init__(self, loader):
        self.loader = loader

    def __getitem__(self, i):
        return self.loader[i].to(DEVICE)


def collate_to_gpu(samples):
    x = torch.stack([s[0] for s in samples])
    return x, torch.stack([s[1] for s in samples])


half = DataLoader(HalfDataset(np.load("x.npy", mmap_mode="r")), batch_size=4, num_workers=4, pin_memory=True)
nli = DataLoader(NLIDataset("snli.csv"), batch_size=32)
tensors = torch.load("cached.pt", mmap=True)
tds = DataLoader(TensorDataset(*tensors), batch_size=64, num_workers=4)
model = torch.nn.Linear(10, 2).to(DEVICE)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in half:
    x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
