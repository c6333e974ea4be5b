"""All the ways in which people turn gradients off."""
import functools

import torch
from torch import inference_mode, no_grad


def with_flag(model, loader):
    torch.set_grad_enabled(False)
    model.eval()
    out = []
    for x in loader:
        out.append(model(x).argmax(-1).cpu())
    torch.set_grad_enabled(True)
    return torch.cat(out)


def with_phase(model, loaders, opt, criterion, device):
    for phase in ["train", "val"]:
        if phase == "train":
            model.train()
        else:
            model.eval()
        running_loss, corrects = 0.0, 0
        for x, y in loaders[phase]:
            x, y = x.to(device), y.to(device)
            opt.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                out = model(x)
                _, preds = torch.max(out, 1)
                loss = criterion(out, y)
                if phase == "train":
                    loss.backward()
                    opt.step()
            running_loss += loss.item() * x.size(0)
            corrects += torch.sum(preds == y.data)
        print(phase, running_loss, corrects.double() / len(loaders[phase].dataset))


@inference_mode()
def decorated(model, loader):
    model.eval()
    return [model(x).cpu() for x in loader]


class Evaluator:
    def __init__(self, model):
        self.model = model.eval()
        self.model.requires_grad_(False)

    @no_grad()
    def run(self, loader):
        self.model.eval()
        total = 0
        for x, y in loader:
            total += torch.nn.functional.cross_entropy(self.model(x), y)
        return total / len(loader)

    def helper(self, x):
        self.model.eval()
        return self.model(x)


def no_grad_decorator(fn):
    @functools.wraps(fn)
    def wrapped(*a, **k):
        with torch.no_grad():
            return fn(*a, **k)

    return wrapped


@no_grad_decorator
def evaluate(model, loader):
    model.eval()
    hits = 0
    for x, y in loader:
        hits += (model(x).argmax(-1) == y).sum().item()
    return hits


def compute(model, loader):
    model.eval()
    hits = 0
    for x, y in loader:
        hits += (model(x).argmax(-1) == y).sum().item()
    return hits


def main(model, loader, opt):
    for x, y in loader:
        model.train()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(compute(model, loader))


def saliency(model, loader):
    model.eval()
    maps = []
    for x, y in loader:
        x.requires_grad_()
        score = model(x).gather(1, y[:, None]).sum()
        (grad,) = torch.autograd.grad(score, x)
        maps.append(grad.abs().cpu())
    return maps


def finetune_with_frozen_dropout(model, loader, opt):
    model.eval()  # no dropout in the last epoch on purpose
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
