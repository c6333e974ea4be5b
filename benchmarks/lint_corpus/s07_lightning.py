import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer


class TextDS(Dataset):
    def __init__(self, df, tokenizer, max_len=256):
        self.texts = df["text"].to_numpy()
        self.labels = torch.as_tensor(df["label"].values)
        self.tok = tokenizer
        self.max_len = max_len

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        enc = self.tok.encode_plus(
            self.texts[i],
            max_length=self.max_len,
            truncation=True,
            padding="max_length",
            return_tensors="pt",
        )
        return {k: v.squeeze(0) for k, v in enc.items()}, self.labels[i]


class LitBert(pl.LightningModule):
    def __init__(self, lr=2e-5):
        super().__init__()
        self.save_hyperparameters()
        self.bert = AutoModel.from_pretrained("bert-base-uncased")
        self.head = torch.nn.Linear(768, 2)
        self.validation_outputs = []

    def forward(self, batch):
        return self.head(self.bert(**batch).last_hidden_state[:, 0])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("val_loss", loss)
        self.validation_outputs.append((logits.argmax(-1) == y).float().mean().cpu())
        return loss

    def on_validation_epoch_end(self):
        self.log("val_acc", torch.stack(self.validation_outputs).mean())
        self.validation_outputs.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    import pandas as pd

    tok = AutoTokenizer.from_pretrained("bert-base-uncased")
    train = DataLoader(TextDS(pd.read_csv("train.csv"), tok), 32, shuffle=True)
    val = DataLoader(TextDS(pd.read_csv("val.csv"), tok), 64)
    trainer = pl.Trainer(max_epochs=3, accumulate_grad_batches=4, precision="16-mixed", gradient_clip_val=1.0)
    trainer.fit(LitBert(), train, val)
