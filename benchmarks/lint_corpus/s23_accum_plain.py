import torch
from torch import nn, optim
from torch.utils.data import DataLoader

ACCUM = 4


def train_a(model, loader, device, epochs=3):
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(epochs):
        optimizer.zero_grad()
        for idx, (src, tgt) in enumerate(loader):
            logits = model(src.to(device))
            loss = criterion(logits.flatten(0, 1), tgt.to(device).flatten())
            loss.backward()
            if (idx + 1) % ACCUM == 0 or idx + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        print(epoch, loss.item())


def train_b(model, loader, device, accumulate=8):
    """normalised through the criterion"""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tokens = 0
    step = 0
    for src, tgt in loader:
        step += 1
        logits = model(src.to(device))
        loss = criterion(logits.flatten(0, 1), tgt.to(device).flatten())
        loss.backward()
        tokens += tgt.numel()
        if step % accumulate == 0 or step == len(loader):
            for p in model.parameters():
                p.grad.div_(tokens)
            optimizer.step()
            optimizer.zero_grad()
            tokens = 0


def train_c(model, loader, device, accumulate=8):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    it = iter(loader)
    for step in range(len(loader) // accumulate):
        optimizer.zero_grad()
        for _ in range(accumulate):
            batch = next(it).to(device)
            loss = model(batch).mean().mul(1 / accumulate)
            loss.backward()
        optimizer.step()


def train_d(model, loader, device, accumulate=8):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    count = 0
    for batch in loader:
        loss = model(batch.to(device)).mean()
        loss /= accumulate
        loss.backward()
        count += 1
        if count == accumulate:
            optimizer.step()
            model.zero_grad()
            count = 0


def train_e(model, loader, device, accumulate=8):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(loader):
        if step % accumulate == 0:
            optimizer.zero_grad()
        loss = model(batch.to(device)).mean() / accumulate
        loss.backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
