import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer


class LineByLineTextDataset(Dataset):
    def __init__(self, tokenizer, file_path, block_size=512):
        with open(file_path, encoding="utf-8") as f:
            lines = [line for line in f.read().splitlines() if (len(line) > 0 and not line.isspace())]
        batch_encoding = tokenizer(lines, add_special_tokens=True, truncation=True, max_length=block_size)
        self.examples = batch_encoding["input_ids"]

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        return torch.tensor(self.examples[i], dtype=torch.long)


class JsonlDataset(Dataset):
    def __init__(self, path):
        self.rows = [json.loads(l) for l in open(path)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class PathDataset(Dataset):
    def __init__(self, path):
        self.data = Path(path).read_text().splitlines()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


class ListDataset(Dataset):
    def __init__(self, path):
        with open(path) as fp:
            self.sents = list(fp)

    def __len__(self):
        return len(self.sents)

    def __getitem__(self, i):
        return self.sents[i]


class OffsetDataset(Dataset):
    """right: seeks"""

    def __init__(self, path):
        self.path = path
        self.offsets = [0]
        with open(path, "rb") as f:
            for line in f:
                self.offsets.append(self.offsets[-1] + len(line))
        self.offsets = torch.tensor(self.offsets)

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        with open(self.path, "rb") as f:
            f.seek(int(self.offsets[i]))
            return f.readline().decode()


tok = AutoTokenizer.from_pretrained("bert-base-uncased")
mlm = LineByLineTextDataset(tok, "wiki.txt")
a = DataLoader(mlm, batch_size=8, num_workers=8)
b = DataLoader(JsonlDataset("train.jsonl"), 8, True, num_workers=2)
c = DataLoader(dataset=PathDataset("t.txt"), batch_size=8, num_workers=4, persistent_workers=True)
d = DataLoader(ListDataset("t.txt"), batch_size=8, num_workers=0)
e = DataLoader(OffsetDataset("t.txt"), batch_size=8, num_workers=4)
