import os

import torch
from torch import nn
from torch.optim import AdamW

device = torch.device("cuda")


def load_checkpoint(path, model, optimizer=None, scheduler=None):
    checkpoint = torch.load(path, map_location=device)
    model.load_state_dict(checkpoint["state_dict"])
    if optimizer is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint


def load_cpu(path, model, optimizer):
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"]


def load_lambda(path, model):
    model.load_state_dict(torch.load(path, map_location=lambda storage, loc: storage))
    return model


def load_positional(path):
    return torch.load(path, "cpu")


def load_kwargs(path, **kw):
    return torch.load(path, **kw)


def train(model, loader):
    model = model.to(device)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    start = 0
    best = torch.load("best_metric.pt")
    if os.path.isfile("last.ckpt"):
        ck = load_checkpoint("last.ckpt", model, optimizer)
        start = ck["epoch"] + 1
    for epoch in range(start, 100):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**{k: v.to(device) for k, v in batch.items()}).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "last.ckpt")
    return best


def train2(model, loader):
    optimizer = AdamW(model.parameters(), lr=1e-4)
    ck = torch.load("last.ckpt", map_location="cuda:0")
    model.load_state_dict(ck["model"])
    optimizer.load_state_dict(ck["optimizer"])
    model.cuda()
    step = ck["step"]
    for x in loader:
        loss = model(x.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    return step
