import argparse

import torch
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler
from transformers import AdamW, BertForMaskedLM, get_linear_schedule_with_warmup


def train(args, dataset, model, tokenizer):
    loader = DataLoader(dataset, sampler=RandomSampler(dataset), batch_size=args.train_batch_size)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    t_total = len(loader) // args.gradient_accumulation_steps * args.epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, args.warmup, t_total)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    if args.n_gpu > 1:
        model = torch.nn.DataParallel(model)
    global_step, tr_loss = 0, 0.0
    model.zero_grad()
    for _ in range(args.epochs):
        for step, batch in enumerate(loader):
            inputs, labels = mask_tokens(batch, tokenizer, args)
            inputs, labels = inputs.to(args.device), labels.to(args.device)
            model.train()
            outputs = model(inputs, labels=labels)
            loss = outputs[0]
            if args.n_gpu > 1:
                loss = loss.mean()
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            tr_loss += loss.item()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                if args.fp16:
                    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
                global_step += 1
            if 0 < args.max_steps < global_step:
                break
    return global_step, tr_loss / global_step


def evaluate(args, dataset, model, tokenizer):
    loader = DataLoader(dataset, batch_size=args.eval_batch_size)
    eval_loss, nb = 0.0, 0
    model.eval()
    for batch in loader:
        inputs, labels = mask_tokens(batch, tokenizer, args)
        with torch.no_grad():
            outputs = model(inputs.to(args.device), labels=labels.to(args.device))
            lm_loss = outputs[0]
            eval_loss += lm_loss.mean().item()
        nb += 1
    return torch.exp(torch.tensor(eval_loss / nb))


def mask_tokens(inputs, tokenizer, args):
    labels = inputs.clone()
    return inputs, labels


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    model = BertForMaskedLM.from_pretrained("bert-base-uncased")
    model.to("cuda")
