"""Finetuning a Transformers model for sequence classification on GLUE (no trainer)."""
import argparse
import math

import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    default_data_collator,
    get_scheduler,
)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task_name", type=str, default="sst2")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--pad_to_max_length", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    raw = load_dataset("glue", args.task_name)
    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
    padding = "max_length" if args.pad_to_max_length else False

    def preprocess(examples):
        result = tokenizer(examples["sentence"], padding=padding, max_length=args.max_length, truncation=True)
        result["labels"] = examples["label"]
        return result

    data = raw.map(preprocess, batched=True, remove_columns=raw["train"].column_names)
    collate = default_data_collator if args.pad_to_max_length else DataCollatorWithPadding(tokenizer)
    train_dl = DataLoader(data["train"], shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size)
    eval_dl = DataLoader(data["validation"], collate_fn=collate, batch_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    steps = math.ceil(len(train_dl) / args.gradient_accumulation_steps) * args.num_train_epochs
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    metric = evaluate.load("glue", args.task_name)
    bar = tqdm(range(steps), disable=not accelerator.is_local_main_process)
    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dl):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)
        model.eval()
        for step, batch in enumerate(eval_dl):
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        accelerator.print(f"epoch {epoch}: {metric.compute()} {total_loss.item() / len(train_dl)}")


if __name__ == "__main__":
    main()
