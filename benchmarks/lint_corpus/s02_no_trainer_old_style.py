"""Old no_trainer example: manual gradient accumulation, last step handled."""
import logging
import math

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator

logger = logging.getLogger(__name__)
accelerator = Accelerator()
GRAD_ACC = 8


def group_texts(examples, block_size=512):
    concatenated = {k: sum(examples[k], []) for k in examples.keys()}
    total_length = (len(concatenated["input_ids"]) // block_size) * block_size
    result = {
        k: [t[i : i + block_size] for i in range(0, total_length, block_size)] for k, t in concatenated.items()
    }
    result["labels"] = result["input_ids"].copy()
    return result


def main():
    ds = load_dataset("wikitext", "wikitext-2-raw-v1")
    tok = AutoTokenizer.from_pretrained("gpt2")
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    ds = ds.map(lambda e: tok(e["text"]), batched=True, remove_columns=["text"]).map(group_texts, batched=True)
    train_dl = DataLoader(ds["train"], shuffle=True, collate_fn=default_data_collator, batch_size=4, num_workers=4)
    eval_dl = DataLoader(ds["validation"], collate_fn=default_data_collator, batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    completed_steps = 0
    for epoch in range(3):
        model.train()
        for step, batch in enumerate(train_dl):
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / GRAD_ACC
            accelerator.backward(loss)
            if step % GRAD_ACC == 0 or step == len(train_dl) - 1:
                optimizer.step()
                optimizer.zero_grad()
                completed_steps += 1

        model.eval()
        losses = []
        for step, batch in enumerate(eval_dl):
            outputs = model(**batch)
            loss = outputs.loss
            losses.append(accelerator.gather(loss.repeat(4)))

        losses = torch.cat(losses)
        try:
            perplexity = math.exp(torch.mean(losses))
        except OverflowError:
            perplexity = float("inf")
        logger.info(f"epoch {epoch}: perplexity: {perplexity}")


if __name__ == "__main__":
    main()
