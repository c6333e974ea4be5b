import argparse

import torch
from torch import nn
from torch.cuda import amp
from torch.utils.data import DataLoader
from transformers import T5ForConditionalGeneration


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--fp16", action="store_true")
    p.add_argument("--lr", type=float, default=1e-4)
    return p.parse_args()


class Engine:
    def __init__(self, args, dataset):
        self.args = args
        self.model = T5ForConditionalGeneration.from_pretrained("t5-small")
        self.model = self.model.to("cuda", dtype=torch.half)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scaler = amp.GradScaler()
        self.loader = DataLoader(dataset, batch_size=8, shuffle=True)

    def step(self, batch):
        with amp.autocast():
            loss = self.model(**batch).loss
        self.optim.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        return loss.item()

    def run(self):
        for batch in self.loader:
            self.step({k: v.cuda() for k, v in batch.items()})


@torch.no_grad()
def serve(path):
    # half for inference alone is right
    model = T5ForConditionalGeneration.from_pretrained(path).half().cuda().eval()
    return lambda ids: model.generate(ids)
