import lightning as L
import torch
from torch import nn


class Seq2SeqModule(L.LightningModule):
    def __init__(self, model, pad_id):
        super().__init__()
        self.model = model
        self.crit = nn.CrossEntropyLoss(ignore_index=pad_id)
        self.train_losses = []
        self.running = 0.0
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        out = self.model(batch["src"], batch["tgt"][:, :-1])
        loss = self.crit(out.flatten(0, 1), batch["tgt"][:, 1:].flatten())
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.train_losses.append(loss)
        self.running = self.running + loss
        if batch_idx % 100 == 0:
            torch.cuda.empty_cache()
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        out = self.model(batch["src"], batch["tgt"][:, :-1])
        loss = self.crit(out.flatten(0, 1), batch["tgt"][:, 1:].flatten())
        self.log("val/loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-4)


def predict(module, loader, device):
    module = module.to(device).eval()
    preds = []
    with torch.inference_mode():
        for batch in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            out = module.model(batch["src"], batch["tgt"])
            preds.append(out)
    return torch.cat(preds)
