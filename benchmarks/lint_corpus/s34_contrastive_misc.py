import torch
import torch.nn.functional as F
from torch.cuda.amp.autocast_mode import autocast
from torch.cuda.amp import custom_fwd, custom_bwd


class MemoryBank:
    def __init__(self, size):
        self.size = size
        self.queue = []

    def push(self, emb):
        self.queue.append(emb.detach())
        self.queue = self.queue[-self.size :]


def info_nce(a, b, t=0.05):
    sims = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / t
    return F.cross_entropy(sims, torch.arange(len(a), device=a.device))


def train(model, loader, opt, bank, device="cuda"):
    log = []
    loss_sum = torch.tensor(0.0, device=device)
    for step, (q, p) in enumerate(loader):
        with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
            eq, ep = model(q.to(device)), model(p.to(device))
            loss = info_nce(eq, ep)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        bank.push(ep)
        loss_sum += loss
        log.append({"step": step, "loss": loss})
        if step % 50 == 49:
            print(loss_sum.item() / 50)
            loss_sum = torch.tensor(0.0, device=device)
    return log


@torch.no_grad()
def encode_corpus(model, loader, device):
    model.eval()
    embs = []
    for x in loader:
        embs.append(model(x.to(device)))
    return torch.cat(embs, dim=0)


@torch.no_grad()
def encode_corpus_ok(model, loader, device, out):
    model.eval()
    n = 0
    for x in loader:
        e = model(x.to(device))
        out[n : n + len(e)] = e.cpu()
        n += len(e)
    return out


def mine_hard(model, loader, device):
    model.eval()
    scores = []
    for q, p in loader:
        s = (model(q.to(device)) * model(p.to(device))).sum(-1)
        scores.append(s.detach().cpu())
    model.train()
    return torch.cat(scores)
