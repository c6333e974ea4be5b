import numpy as np
import torch
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification

from ner_data import load_conll

device = "cuda:0"
tokenizer = AutoTokenizer.from_pretrained("roberta-base")
model = AutoModelForTokenClassification.from_pretrained("roberta-base", num_labels=9)
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
train_set, dev_set, test_set = load_conll(tokenizer)
collator = DataCollatorForTokenClassification(tokenizer)
train_dl = DataLoader(train_set, 16, shuffle=True, collate_fn=collator)
dev_dl = DataLoader(dev_set, 16, collate_fn=collator)


def validate(model, dl):
    model.eval()
    y_true, y_pred = [], []
    total_loss = 0
    for batch in tqdm(dl, desc="dev"):
        batch = {k: v.to(device) for k, v in batch.items()}
        out = model(**batch)
        total_loss += out.loss
        pred = torch.argmax(out.logits, dim=2)
        mask = batch["labels"] != -100
        y_true.extend(batch["labels"][mask].tolist())
        y_pred.extend(pred[mask].cpu().numpy().tolist())
    return total_loss / len(dl), f1_score(y_true, y_pred, average="macro")


def train_one(model, dl):
    model.train()
    epoch_losses = []
    for i, batch in enumerate(tqdm(dl)):
        batch = batch.to(device)
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        epoch_losses += [out.loss]
        torch.cuda.empty_cache()
    return np.mean([l.item() for l in epoch_losses])


if __name__ == "__main__":
    best = 0
    for ep in range(5):
        print("train", train_one(model, train_dl))
        loss, f1 = validate(model, dev_dl)
        if f1 > best:
            best = f1
            torch.save(model.state_dict(), "best.bin")
    model.load_state_dict(torch.load("best.bin"))
    all_logits = []
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(test_set, 16, collate_fn=collator):
            all_logits.append(model(**batch.to(device)).logits)
    torch.save(torch.cat(all_logits), "logits.pt")
