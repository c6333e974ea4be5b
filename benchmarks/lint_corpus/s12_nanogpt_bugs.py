import sys

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig

with open("input.txt", "r", encoding="utf-8") as f:
    text = f.read()
chars = sorted(list(set(text)))
stoi = {ch: i for i, ch in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
n = int(0.9 * len(data))
train_data, val_data = data[:n], data[n:]
device = "cuda"
batch_size, block_size, grad_accum = 16, 256, 4


def get_batch(split):
    d = train_data if split == "train" else val_data
    ix = torch.randint(len(d) - block_size, (batch_size,))
    x = torch.stack([d[i : i + block_size] for i in ix])
    y = torch.stack([d[i + 1 : i + block_size + 1] for i in ix])
    return x.to(device), y.to(device)


def estimate_loss(model, iters=200):
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(iters)
        for k in range(iters):
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


model = GPT(GPTConfig(vocab_size=len(chars))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for it in range(5000):
    if it % 500 == 0:
        print(it, estimate_loss(model))
    X, Y = get_batch("train")
    optimizer.zero_grad(set_to_none=True)
    for micro in range(grad_accum):
        logits, loss = model(X, Y)
        loss = loss / grad_accum
        loss.backward()
    optimizer.step()
