"""Things which look like mistakes and are not."""
import gc
import json

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    def __init__(self, path):
        import pyarrow as pa

        self.table = pa.memory_map(path).read_buffer()

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i


class Pairs(Dataset):
    """few objects: file names"""

    def __init__(self, manifest):
        self.paths = json.load(open(manifest))["shards"]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return torch.load(self.paths[i], map_location="cpu")


def find_batch_size(model, make, start=64):
    bs = start
    while bs > 0:
        try:
            F.cross_entropy(model(make(bs)), torch.zeros(bs, dtype=torch.long)).backward()
            return bs
        except torch.cuda.OutOfMemoryError:
            bs //= 2
            gc.collect()
            torch.cuda.empty_cache()
    raise RuntimeError("nothing fits")


def sweep(models, loader):
    for name in models:
        model = torch.hub.load("x", name).cuda().eval()
        with torch.no_grad():
            hits = sum((model(x.cuda()).argmax(-1) == y.cuda()).sum().item() for x, y in loader)
        print(name, hits)
        del model
        torch.cuda.empty_cache()


def multi_loss(model, batch, opt):
    l1, l2 = model(batch)
    opt.zero_grad()
    l1.backward(retain_graph=True)
    l2.backward()
    opt.step()


def many(model, batch, opt):
    losses = model(batch)
    opt.zero_grad()
    for i, l in enumerate(losses):
        l.backward(retain_graph=i < len(losses) - 1)
    opt.step()


def pcgrad(model, batch, opt):
    grads = []
    for loss in model(batch):
        opt.zero_grad()
        loss.backward(retain_graph=True)
        grads.append([p.grad.clone() for p in model.parameters()])
    for ps, gs in zip(model.parameters(), zip(*grads)):
        ps.grad = sum(gs)
    opt.step()


def several_epochs_on_a_batch(policy, rollout, opt, epochs=4):
    """PPO: the same batch several times, one step each"""
    for _ in range(epochs):
        loss = policy.loss(rollout)
        opt.zero_grad()
        loss.backward()
        opt.step()


def lbfgs(model, x, y):
    opt = torch.optim.LBFGS(model.parameters())

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(20):
        loss = opt.step(closure)
    return loss


def running(model, loader, opt):
    ema = None
    total = 0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss = loss.item()
        ema = loss if ema is None else 0.9 * ema + 0.1 * loss
        total += loss
    return total, ema


def embed_few(model, loader):
    model.eval()
    keep = []
    with torch.no_grad():
        for x in loader:
            out = model(x.cuda())
            keep.append(out.mean().item())
            out = out.cpu()
            keep.append(out)
    return keep


def cached_prefix(model, ids):
    with torch.no_grad():
        past = None
        tokens = []
        for _ in range(100):
            out = model(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            ids = out.logits[:, -1:].argmax(-1)
            tokens.append(ids)
    return torch.cat(tokens, 1)


tok_kwargs = {"padding": "longest", "truncation": True}
loader = DataLoader(Pairs("m.json"), batch_size=None, num_workers=2)
