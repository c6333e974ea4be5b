"""A small training on the CPU that records the birth and death of every storage, and peak resident memory.

    python real_training.py gpt2|lstm MMAP_THRESHOLD      0: glibc's own threshold

Storages count with the size of the request, but the workspace of an LSTM only as far as it is written
(`unwritten_workspace`). `scratch_bytes` are alive while an op runs. Prints one JSON object: the events, and the peak
growth of private memory.
"""

import gc
import json
import sys
import warnings
import weakref

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plimsoll.device import process
from plimsoll.device.cpu import heap
from plimsoll.memory.lowering.cpu_scratch import scratch_bytes
from plimsoll.memory.lowering.mkldnn_rnn import unwritten_workspace

NUM_TOKENS = 8000


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.events = []
        self.live = {}
        self.count = 0

    def take(self, num_bytes):
        self.count += 1
        self.events.append((self.count, num_bytes))
        return self.count

    def add(self, tensor, num_bytes=None):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or storage.nbytes() == 0:
            return
        num_bytes = storage.nbytes() if num_bytes is None else num_bytes
        self.live[key] = index = self.take(num_bytes)

        def end():
            del self.live[key]
            self.events.append((index, -num_bytes))

        weakref.finalize(storage, end)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        scratch = scratch_bytes(name, args, kwargs)
        out = func(*args, **(kwargs or {}))
        unwritten = unwritten_workspace(args, out) if "mkldnn_rnn_layer.default" in name else None
        if unwritten is not None:
            workspace, unwritten_bytes = unwritten
            self.add(workspace, workspace.nbytes - unwritten_bytes)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        if scratch:
            self.events.append((self.take(scratch), -scratch))
        return out


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.net = nn.Embedding(NUM_TOKENS, 256), nn.LSTM(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, NUM_TOKENS)

    def forward(self, ids):
        return self.head(self.net(self.table(ids))[0])


def build(name):
    if name == "lstm":
        return LanguageModel()
    settings = transformers.GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=NUM_TOKENS, n_positions=256, use_cache=False
    )
    return transformers.GPT2LMHeadModel(settings)


def loss_of(name, model):
    ids = torch.randint(0, NUM_TOKENS, (16, 128) if name == "lstm" else (4, 256))
    if name == "lstm":
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return model(input_ids=ids, labels=ids).loss


def main():
    name, threshold_bytes = sys.argv[1], int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    warm = torch.ones(64, 64, requires_grad=True)
    with Recorder():
        (warm @ warm).sum().backward()  # imports at the first op do not belong to the training
    _ = transformers.GPT2LMHeadModel  # imported here, at its first use
    gc.collect()
    if threshold_bytes:
        heap.map_blocks_from(threshold_bytes)
    heap.trim()
    peak = process.PeakCounter()
    base_bytes = process.private_bytes()
    peak.reset()
    with Recorder() as recorder:
        model = build(name)
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.add(tensor.data)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            loss = loss_of(name, model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    peak_bytes = peak.read(process.private_bytes()) - base_bytes
    print(json.dumps({"events": recorder.events, "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main()
