"""Shared code of the planted scripts: small models in the style of users, and a run under a limit.

``PLANTED_MIB`` sets the memory of a script in addition to Python and torch ("0": no limit). ``PLANTED_CALLS`` ends the
script before the next call after that many calls of its model. ``PLANTED_RESULT`` is the file for the result: the
diagnosis, the number of model calls, and the highest private memory of the process and its children.
"""

import json
import os
import resource
import threading

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import plimsoll
from plimsoll.device import process, watched


class MiniGPT(nn.Module):
    """A decoder with attention written out."""

    def __init__(self, vocabulary, width, layers, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # ALSO logits


class Block(nn.Module):
    """Attention and a feed-forward network, with residual connections."""

    fused = os.environ.get("PLANTED_ATTENTION") == "fused"

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden):
        hidden = hidden + self.out(self.attend(self.first(hidden)))
        return hidden + self.mlp(self.second(hidden))

    def attend(self, hidden):
        batch, length, width = hidden.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-2, -1)  # ALSO attention_scores
            scores = scores / (width // self.heads) ** 0.5
            mixed = torch.softmax(scores, dim=-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, width)


def batches(vocabulary, batch, length, steps):
    """Yield random tokens."""
    for _ in range(steps):
        yield torch.randint(0, vocabulary, (batch, length))


def next_token_loss(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())  # ALSO logits


def _warm_up():
    """Do torch's one-time work: loading libraries and starting threads."""
    layer = nn.Linear(64, 64)
    layer(torch.ones(64, 64)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()


class Enough(BaseException):
    """Raised when the model was called the requested number of times."""


class Calls:
    """Counts calls of top-level modules, and raises `Enough` before one too many."""

    def __init__(self, most):
        self.number, self.most, self.depth = 0, most, 0
        register_module_forward_pre_hook(self.begin)
        register_module_forward_hook(self.end, always_call=True)

    def begin(self, module, args):
        if self.depth == 0:
            if self.number == self.most:
                raise Enough
            self.number += 1
        self.depth += 1

    def end(self, module, args, output):
        self.depth -= 1


class PeakOfChildren:
    """The highest sum of private memory of the child processes, sampled 20 times a second."""

    def __init__(self):
        self.num_bytes, self.is_over = 0, threading.Event()
        threading.Thread(target=self.look, daemon=True).start()

    def look(self):
        own = os.getpid()
        while not self.is_over.wait(0.05):
            family = [one for one in watched.family_of(own) if one.pid != own]
            self.num_bytes = max(self.num_bytes, sum(one.private_bytes or 0 for one in family))


def run(main, free_mib):
    """Run a training under a limit, and write the result."""
    torch.manual_seed(0)
    told = plimsoll.explained()
    _warm_up()
    calls = Calls(int(os.environ.get("PLANTED_CALLS", "-1")))
    free_mib = int(os.environ.get("PLANTED_MIB", free_mib))
    children = PeakOfChildren() if free_mib == 0 else None
    if free_mib:
        limit_bytes = process.data_bytes() + (free_mib << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    peak = process.PeakCounter()
    peak.reset()
    try:
        with told:
            main()
    except Enough:
        pass
    finally:
        if path := os.environ.get("PLANTED_RESULT"):
            diagnosis = None if told.diagnosis is None else json.loads(told.diagnosis.to_json())
            peak_bytes = peak.read(process.private_bytes()) + (children.num_bytes if children else 0)
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"diagnosis": diagnosis, "calls": calls.number, "peak_bytes": peak_bytes}, file)
