import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from mydata import TokenDataset
from mymodel import GPT, GPTConfig


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.cuda.empty_cache()
    ds = TokenDataset("train.bin")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    model = GPT(GPTConfig()).cuda(rank)
    model = DDP(model, device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    accum = 8
    start_epoch = 0
    if os.path.exists("ckpt.pt"):
        ckpt = torch.load("ckpt.pt", map_location=f"cuda:{rank}")
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        start_epoch = ckpt["epoch"] + 1
        del ckpt
    for epoch in range(start_epoch, 10):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=rank)
        opt.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(loader):
            x, y = x.cuda(rank, non_blocking=True), y.cuda(rank, non_blocking=True)
            last = (i + 1) % accum == 0 or i + 1 == len(loader)
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    logits = model(x)
                    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)) / accum
                loss.backward()
            running += loss.detach()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
        dist.all_reduce(running)
        if rank == 0:
            print(epoch, running.item())
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "ckpt.pt")
        del x, y, logits, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
