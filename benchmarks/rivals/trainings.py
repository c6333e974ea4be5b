"""Small trainings in plain PyTorch whose peak memory is predicted and measured; needs only torch and transformers.

    python benchmarks/rivals/trainings.py CASE

Trains a case for a few steps. After the imports and after each step it prints a JSON line with the private memory of
this process. The interpreters of other tools import this file too, so that all get the same code. The loop is the usual
one: forward, loss, backward, clip, step, ``zero_grad``, in float32, with default dropout.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

NUM_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A training: the kind of model, its sizes, samples and tokens of a batch, and torch's optimizer."""

    name: str
    kind: str
    fields: dict[str, Any] = field(hash=False)
    batch_size: int
    length: int
    vocab_size: int = 8000
    optimizer: str = "AdamW"


def gpt2(num_layers: int, width: int) -> dict[str, Any]:
    return {"n_layer": num_layers, "n_embd": width, "n_head": width // 64}


def bert(num_layers: int, width: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": num_layers, "hidden_size": width, "intermediate_size": 4 * width}
    return {**sizes, "num_attention_heads": width // 64}


def t5(num_layers: int, width: int) -> dict[str, Any]:
    sizes = {"num_layers": num_layers, "d_model": width, "d_ff": 4 * width, "d_kv": 32, "num_heads": width // 32}
    return {**sizes, "decoder_start_token_id": 0, "pad_token_id": 0}


def lstm(num_layers: int, width: int) -> dict[str, Any]:
    return {"num_layers": num_layers, "width": width}


CASES = (
    Case("GPT-2 4 x 256, 8 x 128", "gpt2", gpt2(4, 256), 8, 128),
    Case("GPT-2 4 x 256, 16 x 256", "gpt2", gpt2(4, 256), 16, 256),
    Case("GPT-2 6 x 384, 50k words, 2 x 512", "gpt2", gpt2(6, 384), 2, 512, 50257),
    Case("BERT 4 x 256, 16 x 128", "bert", bert(4, 256), 16, 128),
    Case("BERT 6 x 384, 30k words, 4 x 384", "bert", bert(6, 384), 4, 384, 30522),
    Case("BERT 4 x 256, 32 x 128, SGD", "bert", bert(4, 256), 32, 128, optimizer="SGD"),
    Case("T5 3 x 256, 8 x 128", "t5", t5(3, 256), 8, 128, 32128),
    Case("T5 3 x 256, 8 x 256", "t5", t5(3, 256), 8, 256),
    Case("LSTM 2 x 256, 16 x 128", "lstm", lstm(2, 256), 16, 128),
    Case("LSTM 2 x 512, 20k words, 32 x 128", "lstm", lstm(2, 512), 32, 128, 20000),
)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# -- the models --------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """The part of a Hugging Face model's output that the loop needs."""

    loss: Tensor


class LstmModel(nn.Module):
    """A recurrent language model."""

    def __init__(self, vocab_size: int, num_layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.rnn = nn.LSTM(width, width, num_layers, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output | Tensor:
        scores = self.head(self.rnn(self.embedding(input_ids))[0])
        if labels is None:
            return scores
        return Output(functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


CLASSES = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
}


def config_of(case: Case) -> Any:
    """Return the Hugging Face configuration of a case, or None for an LSTM."""
    return CLASSES[case.kind][0](vocab_size=case.vocab_size, **case.fields)


def build(case: Case) -> nn.Module:
    if case.kind == "lstm":
        return LstmModel(case.vocab_size, **case.fields).train()
    return CLASSES[case.kind][1](config_of(case)).train()


def with_loss(model: nn.Module) -> nn.Module:
    """Wrap a model so that it is called with tokens only and returns its loss, for tools that require this."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, labels=input_ids).loss

    return WithLoss().train()


# -- the loop ----------------------------------------------------------------------------------------------------------


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, case.optimizer)(model.parameters(), lr=1e-3)


def batch_of(case: Case) -> dict[str, Tensor]:
    tokens = torch.randint(3, min(case.vocab_size, 1000), (case.batch_size, case.length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    loss = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(case: Case, num_steps: int = NUM_STEPS) -> None:
    """Run the whole training."""
    model = build(case)
    optimizer = make_optimizer(case, model)
    for _ in range(num_steps):
        step(model, optimizer, batch_of(case))


# -- measured ----------------------------------------------------------------------------------------------------------


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def high_water_bytes() -> int:
    """Return the peak of resident memory minus the currently resident mapped files."""
    return status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem")


def main() -> None:
    case = case_named(sys.argv[1])
    torch.manual_seed(0)
    torch.ones(1 << 20).add_(1).sum()  # start the threads before the base is read
    print(json.dumps({"base_bytes": status_bytes("RssAnon")}), flush=True)
    model = build(case)
    optimizer = make_optimizer(case, model)
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        step(model, optimizer, batch_of(case))
        print(json.dumps({"peak_bytes": high_water_bytes(), "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
