import os
from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, model, train_ds, val_ds, cfg):
        self.cfg = cfg
        self.device = torch.device(cfg.device)
        self.model = model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.model.to(self.device)
        self.train_loader = DataLoader(train_ds, batch_size=cfg.bs, shuffle=True, num_workers=cfg.workers)
        self.val_loader = DataLoader(val_ds, batch_size=cfg.bs)
        self.criterion = nn.CrossEntropyLoss()
        self.scaler = torch.amp.GradScaler()
        self.history = defaultdict(list)
        self.epoch = 0
        if torch.cuda.device_count() > 1:
            self.model = nn.DataParallel(self.model)

    def resume(self, path):
        ckpt = torch.load(path)
        self.model.load_state_dict(ckpt["model"])
        self.optimizer.load_state_dict(ckpt["optimizer"])
        self.epoch = ckpt["epoch"]

    def train_epoch(self):
        self.model.train()
        for i, batch in enumerate(self.train_loader):
            batch = {k: v.to(self.device) for k, v in batch.items()}
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type):
                logits = self.model(batch["input_ids"])
                loss = self.criterion(logits, batch["label"]) / self.cfg.accum
            self.scaler.scale(loss).backward()
            if (i + 1) % self.cfg.accum == 0 or (i + 1) == len(self.train_loader):
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.history["train_loss"].append(loss)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        correct = total = 0
        for batch in self.val_loader:
            logits = self.model(batch["input_ids"].to(self.device))
            correct += (logits.argmax(-1) == batch["label"].to(self.device)).sum()
            total += len(batch["label"])
        return (correct / total).item()

    def fit(self):
        while self.epoch < self.cfg.epochs:
            self.train_epoch()
            print(self.epoch, self.evaluate())
            self.epoch += 1
            os.makedirs(self.cfg.out, exist_ok=True)
            torch.save({"model": self.model.state_dict()}, f"{self.cfg.out}/{self.epoch}.pt")
