import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

accelerator = Accelerator(mixed_precision="fp16")
accum_steps = 4


def evaluate(model, dataloader):
    model.eval()
    losses, preds = [], []
    for step, batch in enumerate(dataloader):
        with torch.no_grad():
            outputs = model(batch["input_ids"], labels=batch["labels"])
        losses.append(accelerator.gather(outputs.loss))
        preds.append(outputs.logits)
    loss = torch.mean(torch.stack(losses))
    return loss.item(), preds


def training(model, train_dataloader, eval_dataloader, tokenizer, epochs=3):
    optimizer = AdamW(model.parameters(), lr=5e-4)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(epochs):
        model.train()
        for step, batch in enumerate(train_dataloader, start=1):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss = loss / accum_steps
            accelerator.backward(loss)
            if step % accum_steps == 0 or step == len(train_dataloader):
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        print(evaluate(model, eval_dataloader)[0])


def main(ds):
    tok = AutoTokenizer.from_pretrained("t5-base")
    model = AutoModelForSeq2SeqLM.from_pretrained("t5-base")
    collate = DataCollatorForSeq2Seq(tok, model=model)
    tr = DataLoader(ds["train"], 8, shuffle=True, collate_fn=collate)
    ev = DataLoader(ds["validation"], 8, collate_fn=collate)
    training(model, tr, ev, tok)
    generated = []
    for batch in ev:
        with torch.no_grad():
            ids = accelerator.unwrap_model(model).generate(batch["input_ids"], max_new_tokens=64)
        ids = accelerator.gather(ids).cpu().numpy()
        generated += tok.batch_decode(ids, skip_special_tokens=True)
    return generated
