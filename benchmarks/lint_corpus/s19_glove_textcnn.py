import os
import pickle

import numpy as np
import torch
import torch.nn as nn
from gensim.models import KeyedVectors
from torch.utils.data import DataLoader, Dataset


def load_glove(path):
    embeddings_index = {}
    with open(path, encoding="utf8") as f:
        for line in f:
            values = line.split()
            embeddings_index[values[0]] = np.asarray(values[1:], dtype="float32")
    return embeddings_index


def load_some(path, vocab, dim=300):
    matrix = np.zeros((len(vocab), dim), dtype="float32")
    with open(path, encoding="utf8") as f:
        for line in f:
            word, rest = line.split(" ", 1)
            if word in vocab:
                matrix[vocab[word]] = np.fromstring(rest, sep=" ")
    return matrix


class Reviews(Dataset):
    def __init__(self, path):
        self.samples = []
        for name in os.listdir(path):
            with open(os.path.join(path, name)) as f:
                text = f.read()
            self.samples.append((text, int(name.split("_")[1][0])))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, idx):
        text, label = self.samples[idx]
        ids = torch.tensor([hash(w) % 50000 for w in text.split()][:400])
        return ids.cuda(), torch.tensor(label).cuda()


def collate(batch):
    xs, ys = zip(*batch)
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.stack(ys)


class TextCNN(nn.Module):
    def __init__(self, matrix):
        super().__init__()
        self.emb = nn.Embedding.from_pretrained(torch.from_numpy(matrix), freeze=False)
        self.convs = nn.ModuleList([nn.Conv1d(300, 100, k) for k in (3, 4, 5)])
        self.fc = nn.Linear(300, 2)

    def forward(self, x):
        x = self.emb(x).transpose(1, 2)
        return self.fc(torch.cat([c(x).relu().max(-1)[0] for c in self.convs], 1))


w2v = KeyedVectors.load_word2vec_format("GoogleNews-vectors-negative300.bin", binary=True)
small = KeyedVectors.load_word2vec_format("GoogleNews-vectors-negative300.bin", binary=True, limit=50000)
with open("vocab.pkl", "rb") as f:
    vocab = pickle.load(f)
glove = load_glove("glove.840B.300d.txt")
matrix = load_some("glove.840B.300d.txt", vocab)
model = TextCNN(matrix).cuda()
train_dl = DataLoader(Reviews("aclImdb/train"), batch_size=64, shuffle=True, num_workers=4, collate_fn=collate)
opt = torch.optim.Adam(model.parameters())
for epoch in range(5):
    running = 0.0
    for x, y in train_dl:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        running += loss.item() * x.size(0)
    print(epoch, running / len(train_dl.dataset))
