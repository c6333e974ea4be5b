# %% [code]
import gc
import os
import time

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.model_selection import StratifiedKFold
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModel, AutoTokenizer, get_cosine_schedule_with_warmup


class CFG:
    model = "microsoft/deberta-v3-base"
    max_len = 512
    epochs = 4
    bs = 8
    gradient_accumulation_steps = 2
    max_grad_norm = 1000
    apex = True
    n_fold = 5


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# %% [code]
train = pd.read_csv("../input/feedback/train.csv")
tokenizer = AutoTokenizer.from_pretrained(CFG.model)


def prepare_input(text):
    inputs = tokenizer.encode_plus(
        text,
        return_tensors=None,
        add_special_tokens=True,
        max_length=CFG.max_len,
        pad_to_max_length=True,
        truncation=True,
    )
    for k, v in inputs.items():
        inputs[k] = torch.tensor(v, dtype=torch.long)
    return inputs


class TrainDataset(Dataset):
    def __init__(self, df):
        self.texts = df["full_text"].values
        self.labels = df[["cohesion", "syntax"]].values

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, item):
        return prepare_input(self.texts[item]), torch.tensor(self.labels[item], dtype=torch.float)


# %% [code]
def train_fn(fold, train_loader, model, criterion, optimizer, epoch, scheduler, device):
    model.train()
    scaler = torch.cuda.amp.GradScaler(enabled=CFG.apex)
    losses = []
    for step, (inputs, labels) in enumerate(train_loader):
        for k, v in inputs.items():
            inputs[k] = v.to(device)
        labels = labels.to(device)
        with torch.cuda.amp.autocast(enabled=CFG.apex):
            y_preds = model(inputs)
            loss = criterion(y_preds, labels)
        if CFG.gradient_accumulation_steps > 1:
            loss = loss / CFG.gradient_accumulation_steps
        losses.append(loss.item())
        scaler.scale(loss).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)
        if (step + 1) % CFG.gradient_accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    return np.mean(losses)


def valid_fn(valid_loader, model, criterion, device):
    losses = []
    model.eval()
    preds = []
    for step, (inputs, labels) in enumerate(valid_loader):
        inputs = {k: v.to(device) for k, v in inputs.items()}
        with torch.no_grad():
            y_preds = model(inputs)
            loss = criterion(y_preds, labels.to(device))
        losses.append(loss.item())
        preds.append(y_preds.to("cpu").numpy())
    return np.mean(losses), np.concatenate(preds)


# %% [code]
for fold in range(CFG.n_fold):
    model = build(CFG).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(TrainDataset(train[train.fold != fold]), batch_size=CFG.bs, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)
    for epoch in range(CFG.epochs):
        train_fn(fold, loader, model, nn.SmoothL1Loss(), optimizer, epoch, None, device)
    torch.cuda.empty_cache()
    gc.collect()
    state = torch.load(f"fold{fold}.pth", map_location=torch.device("cpu"))["model"]
    model.load_state_dict(state)
    del model, optimizer
    gc.collect()
