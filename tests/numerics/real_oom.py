"""Trainings under real limits, each in a fresh process, for `test_real_oom.py`: `python real_oom.py gpt2 FOLDER`.

The program imports the modules of the model. For each line of standard input it forks a process that trains one epoch.
`limited BYTES` trains with Plimsoll's step under a limit. `plain 8 4 4 4` trains with the plain loop, without a limit
and in micro-batches of these sizes. Lines of JSON on standard output report the process id, the events and the end. The
weights are saved in FOLDER.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.device.base import backend_for, limited
from plimsoll.step.train_step import TrainStep
from workloads import NUM_SAMPLES, Case, Output, plain_loop, weights_of

VOCABULARY = 2000
NUM_STEPS = 3


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**shape, use_cache=False, loss_type="ForCausalLMLoss"))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "num_labels": 3,
    }
    return BertForSequenceClassification(BertConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=512))


class Lstm(nn.Module):
    """Two layers with dropout between them; most of the memory is in the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.lstm = nn.LSTM(128, 128, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.lstm(self.embedding(input_ids))[0])
        return Output(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


class Cnn(nn.Module):
    """A convolutional classifier with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        block = [nn.Conv1d(128, 128, 3), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*block, nn.Conv1d(128, 128, 3), nn.BatchNorm1d(128))
        self.head = nn.Linear(128, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden = self.layers(self.embedding(input_ids).transpose(1, 2)).amax(dim=2)
        return Output(nn.functional.cross_entropy(self.head(hidden), labels))


def ids(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (NUM_SAMPLES, length), generator=torch.Generator().manual_seed(7))


def text(length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(length), "labels": ids(length)}


def classes(length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(length), "labels": ids(length).sum(dim=1) % 3}


CASES = {
    "gpt2": Case("gpt2", gpt2, lambda: text(256), "next-tokens"),
    "bert": Case("bert", bert, lambda: classes(384), "samples"),
    "lstm": Case("lstm", Lstm, lambda: text(512), "next-tokens"),
    "cnn": Case("cnn", Cnn, lambda: classes(8192), "samples", has_batch_norm=True),
}


def limited_epoch(case: Case, budget_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the events with the ledger (the sample ids of each step's last attempt), and the weights."""
    seen: list[int] = []
    ledger: list[int] = []
    cuts: list[int] = []
    events = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        seen.extend(batch.pop("sample_ids").tolist())
        return model(**batch).loss

    with limited(budget_bytes):
        model, optimizer = case.fresh(1e-3)
        step = TrainStep(model, optimizer, loss, units=case.units, clip_norm=1.0, recut_batch_norm=True)
        for number, batch in enumerate(case.batches()[:NUM_STEPS]):
            size = len(batch["labels"])
            result = step(batch | {"sample_ids": torch.arange(size) + number * size})
            ledger += seen[-size:]
            cuts.append(result.micro_batch)
            events += result.oom_events
    happened = {"ledger": ledger, "cuts": cuts, "phases": [event.phase for event in events]}
    return happened, weights_of(model, optimizer)


def plain_epoch(case: Case, cuts: list[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the baseline and peak in bytes, and the weights."""
    backend = backend_for("cpu")
    baseline_bytes = backend.use().used_bytes
    backend.reset_peak()
    model, optimizer = case.fresh(1e-3)
    plain_loop(case, model, optimizer, cuts)
    return {"baseline_bytes": baseline_bytes, "peak_bytes": backend.use().peak_bytes}, weights_of(model, optimizer)


def train(case: Case, request: list[str], folder: Path) -> None:
    kind, *numbers = request
    if kind == "limited":
        happened, weights = limited_epoch(case, int(numbers[0]))
    else:
        happened, weights = plain_epoch(case, [int(number) for number in numbers])
    torch.save(weights, folder / f"{kind}.pt")
    print(json.dumps(happened), flush=True)


def main() -> None:
    case, folder = CASES[sys.argv[1]], Path(sys.argv[2])
    # Import the modules of the model and the optimizer. No thread is started here, since forks would lack it.
    case.build()
    importlib.import_module("torch._dynamo")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            train(case, line.split(), folder)
            sys.stdout.flush()
            os._exit(0)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"exit_code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
