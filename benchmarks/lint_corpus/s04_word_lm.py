import math
import time

import torch
import torch.nn as nn

import data
import model as lm

corpus = data.Corpus("./data/wikitext-2")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
bptt, clip, lr = 35, 0.25, 20


def batchify(source, bsz):
    nbatch = source.size(0) // bsz
    source = source.narrow(0, 0, nbatch * bsz)
    return source.view(bsz, -1).t().contiguous().to(device)


train_data = batchify(corpus.train, 20)
val_data = batchify(corpus.valid, 10)
ntokens = len(corpus.dictionary)
model = lm.RNNModel("LSTM", ntokens, 200, 200, 2, 0.2).to(device)
criterion = nn.NLLLoss()


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    else:
        return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(10)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(epoch):
    model.train()
    total_loss = 0.0
    start_time = time.time()
    hidden = model.init_hidden(20)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % 200 == 0 and batch > 0:
            cur_loss = total_loss / 200
            print(f"| {epoch} | {batch} | {cur_loss:5.2f} | {math.exp(cur_loss):8.2f} {time.time() - start_time}")
            total_loss = 0


best = None
for epoch in range(1, 41):
    train(epoch)
    val_loss = evaluate(val_data)
    if not best or val_loss < best:
        with open("model.pt", "wb") as f:
            torch.save(model, f)
        best = val_loss
with open("model.pt", "rb") as f:
    model = torch.load(f)
print(evaluate(batchify(corpus.test, 10)))
