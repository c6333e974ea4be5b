import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm


def train_epoch(cfg, model, loader, optimizer, scheduler, scaler, device):
    model.train()
    meter = []
    pbar = tqdm(enumerate(loader), total=len(loader))
    optimizer.zero_grad()
    for step, data in pbar:
        ids = data["ids"].to(device)
        with torch.cuda.amp.autocast(dtype=torch.float16):
            out = model(ids)
            loss = nn.BCEWithLogitsLoss()(out, data["target"].to(device))
        scaler.scale(loss).backward()
        if (step + 1) % cfg["accumulation"] == 0:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            for p in model.parameters():
                p.grad = None
            scheduler.step()
        meter.append(loss.cpu())
        pbar.set_postfix(loss=loss.item())
    return torch.stack(meter).mean()


def valid_epoch(model, loader, device):
    model.eval()
    outs, ys = [], []
    for data in tqdm(loader):
        out = model(data["ids"].to(device))
        outs.append(out.sigmoid().cpu().detach().numpy())
        ys.append(data["target"].numpy())
    return outs, ys


def run(cfg, model, train_ds, valid_ds):
    device = torch.device(cfg.get("device", "cuda"))
    train_loader = DataLoader(train_ds, batch_size=cfg["bs"], num_workers=cfg["nw"], shuffle=True, pin_memory=True)
    valid_loader = DataLoader(valid_ds, batch_size=cfg["bs"] * 2, num_workers=cfg["nw"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    scaler = torch.cuda.amp.GradScaler()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, cfg["lr"], total_steps=len(train_loader))
    model.to(device)
    history = []
    for epoch in range(cfg["epochs"]):
        tr = train_epoch(cfg, model, train_loader, optimizer, scheduler, scaler, device)
        outs, ys = valid_epoch(model, valid_loader, device)
        history.append(float(tr))
    return history
