"""Annotated-transformer style."""
import time
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader


@dataclass
class TrainState:
    step: int = 0
    accum_step: int = 0
    samples: int = 0
    tokens: int = 0


class SimpleLossCompute:
    def __init__(self, generator, criterion):
        self.generator, self.criterion = generator, criterion

    def __call__(self, x, y, norm):
        x = self.generator(x)
        sloss = self.criterion(x.contiguous().view(-1, x.size(-1)), y.contiguous().view(-1)) / norm
        return sloss.data * norm, sloss


def run_epoch(data_iter, model, loss_compute, optimizer, scheduler, mode="train", accum_iter=1, state=None):
    start = time.time()
    total_tokens, total_loss, tokens, n_accum = 0, 0, 0, 0
    state = state or TrainState()
    for i, batch in enumerate(data_iter):
        out = model.forward(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        loss, loss_node = loss_compute(out, batch.tgt_y, batch.ntokens)
        if mode == "train" or mode == "train+log":
            loss_node.backward()
            state.step += 1
            state.samples += batch.src.shape[0]
            state.tokens += batch.ntokens
            if i % accum_iter == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                n_accum += 1
                state.accum_step += 1
            scheduler.step()
        total_loss += loss
        total_tokens += batch.ntokens
        tokens += batch.ntokens
        if i % 40 == 1 and (mode == "train" or mode == "train+log"):
            print(i, n_accum, loss / batch.ntokens, tokens / (time.time() - start))
            start, tokens = time.time(), 0
        del loss
        del loss_node
    return total_loss / total_tokens, state


def collate_batch(batch, src_pipeline, tgt_pipeline, device, max_padding=128, pad_id=2):
    src_list, tgt_list = [], []
    for _src, _tgt in batch:
        s = torch.tensor(src_pipeline(_src), dtype=torch.int64, device=device)
        t = torch.tensor(tgt_pipeline(_tgt), dtype=torch.int64, device=device)
        src_list.append(pad(s, (0, max_padding - len(s)), value=pad_id))
        tgt_list.append(pad(t, (0, max_padding - len(t)), value=pad_id))
    return torch.stack(src_list), torch.stack(tgt_list)


def train_worker(gpu, train_ds, valid_ds, make_model, config):
    model = make_model()
    model.cuda(gpu)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) ** -0.5, (s + 1) * 3000**-1.5))
    crit = nn.KLDivLoss(reduction="sum")
    for epoch in range(config["num_epochs"]):
        model.train()
        run_epoch(train_ds, model, SimpleLossCompute(model.generator, crit), optimizer, sched, accum_iter=10)
        torch.cuda.empty_cache()
        model.eval()
        with torch.no_grad():
            sloss = run_epoch(valid_ds, model, SimpleLossCompute(model.generator, crit), None, None, mode="eval")
        print(sloss)
        torch.cuda.empty_cache()
