"""Step-based loops over endless streams: nothing is dropped, nothing is not normalised."""
import itertools

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer


class Packed(IterableDataset):
    def __init__(self, path, tok, block=1024):
        self.path, self.tok, self.block = path, tok, block

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        buf = []
        with open(self.path) as f:
            lines = f if info is None else itertools.islice(f, info.id, None, info.num_workers)
            for line in lines:
                buf += self.tok(line)["input_ids"]
                while len(buf) >= self.block:
                    yield torch.tensor(buf[: self.block])
                    buf = buf[self.block :]


def cycle(dl):
    while True:
        for x in dl:
            yield x


def main(max_steps=10_000, accum=16):
    tok = AutoTokenizer.from_pretrained("gpt2")
    model = AutoModelForCausalLM.from_pretrained("gpt2").to("cuda")
    dl = DataLoader(Packed("big.txt", tok), batch_size=4, num_workers=2)
    stream = load_dataset("c4", "en", split="train", streaming=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = cycle(dl)
    for step in range(max_steps):
        total = 0.0
        for _ in range(accum):
            x = next(batches).to("cuda")
            loss = model(x, labels=x).loss / accum
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(step, total)
        if step % 5000 == 0:
            torch.cuda.empty_cache()
    n = 0
    for i, x in enumerate(batches):
        loss = model(x.to("cuda"), labels=x.to("cuda")).loss / accum
        loss.backward()
        if (i + 1) % accum == 0:
            opt.step()
            opt.zero_grad()
            n += 1
            if n >= max_steps:
                break


def config():
    with open("config.json") as f:
        text = f.read()
    stop_words = [w.strip() for w in open("stopwords.txt").readlines()]
    with open("vocab.txt") as f:
        vocab = {w: i for i, w in enumerate(f.read().split())}
    return text, stop_words, vocab


if __name__ == "__main__":
    main()
