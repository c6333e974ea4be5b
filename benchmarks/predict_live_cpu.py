"""Predicted and measured peaks of live bytes on the CPU, exact to the byte, for small models of twelve kinds.

    python benchmarks/predict_live_cpu.py [--only gpt2] [--out FOLDER] [--data 'corpus/*.txt']

Each case is a plain PyTorch loop of three steps (forward, backward, clip, optimizer, zero_grad). It is first traced on
fake tensors and then run and recorded, in the same process. Cases are kinds x precision (fp32, bf16 autocast) x
activation checkpointing (off, on, if the model supports it) x micro-batches per step (1, 2); AdamW and SGD alternate.
Live bytes include all storages that the recorder sees; the allocator's overhead is not included (see `measure`).

The last line is one JSON object. For a case that is not equal, the first op at which the traces differ is listed.
"""

from __future__ import annotations

import argparse
import gc
import glob
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from _results import add_out, errors_table, fenced, file_result
from plimsoll.memory.compare import compare
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.measure import measure_training
from plimsoll.memory.trace import DryRun, trace_training
from plimsoll.records.comparison import Comparison, Difference
from plimsoll.records.units import format_bytes

VOCABULARY, WIDTH, LENGTH, SAMPLES, STEPS = 211, 32, 24, 4, 3
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Batch = dict[str, Tensor]


# -- the models --------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM language model, or a GRU classifier of packed sequences."""

    def __init__(self, classifies: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.rnn: nn.RNNBase = (
            nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
            if classifies
            else nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        )
        self.head = nn.Linear(2 * WIDTH if classifies else WIDTH, 3 if classifies else VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, lengths: Tensor | None = None) -> Tensor:
        embedded = self.dropout(self.embedding(input_ids))
        if lengths is None:
            scores = self.head(self.rnn(embedded)[0])
            return functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        return functional.cross_entropy(self.head(torch.cat([last[-2], last[-1]], 1)).float(), labels)


class Layers(nn.Module):
    """A classifier with an embedding, a stack of layers that can be recomputed, and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 3)
        self.recomputes = False

    def gradient_checkpointing_enable(self) -> None:
        self.recomputes = True

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recomputes else layer(hidden)
        return functional.cross_entropy(self.head(hidden.mean(1)).float(), labels)


class Convolution(nn.Module):
    """A residual 1-D convolution over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + functional.relu(self.norm(self.convolution(hidden.transpose(1, 2)))).transpose(1, 2)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)


def hugging_face(name: str, config: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name)(config)


BERT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH, **SIZES}


@dataclass(frozen=True)
class Kind:
    """A kind of model: its constructor, its kind of batches, and whether it supports checkpointing."""

    name: str
    make: Callable[[], nn.Module]
    batch: str = "tokens"
    can_checkpoint: bool = True


def kinds() -> list[Kind]:
    t = transformers
    deep = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    albert = hugging_face("AlbertForMaskedLM", t.AlbertConfig(embedding_size=16, **BERT))
    return [
        Kind("gpt2", hugging_face("GPT2LMHeadModel", t.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, **SIZES))),
        Kind("bert classifier", hugging_face("BertForSequenceClassification", t.BertConfig(**BERT)), "padded classes"),
        Kind("bert masked", hugging_face("BertForMaskedLM", t.BertConfig(**BERT)), "padded"),
        Kind(
            "t5",
            hugging_face(
                "T5ForConditionalGeneration",
                t.T5Config(
                    d_model=WIDTH, d_kv=8, num_heads=4, num_layers=2, d_ff=2 * WIDTH, decoder_start_token_id=0, **SIZES
                ),
            ),
            "padded",
        ),
        Kind(
            "llama",
            hugging_face(
                "LlamaForCausalLM", t.LlamaConfig(**deep, num_key_value_heads=2, intermediate_size=2 * WIDTH, **SIZES)
            ),
        ),
        Kind(
            "opt",
            hugging_face(
                "OPTForCausalLM",
                t.OPTConfig(**deep, ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH, max_position_embeddings=64, **SIZES),
            ),
            "padded",
        ),
        Kind(
            "gpt-neo",
            hugging_face(
                "GPTNeoForCausalLM",
                t.GPTNeoConfig(
                    hidden_size=WIDTH, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
                    window_size=8, max_position_embeddings=64, **SIZES,
                ),
            ),
        ),
        Kind(
            "distilbert",
            hugging_face(
                "DistilBertForSequenceClassification",
                t.DistilBertConfig(dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=2 * WIDTH, **SIZES),
            ),
            "padded classes",
        ),
        Kind("albert", albert, "padded", can_checkpoint=False),
        Kind("lstm", lambda: Recurrent(classifies=False), can_checkpoint=False),
        Kind("gru packed", lambda: Recurrent(classifies=True), "lengths", can_checkpoint=False),
        Kind("encoder", lambda: Layers([encoder_layer(), encoder_layer()]), "classes"),
        Kind("cnn", lambda: Layers([Convolution(), Convolution()]), "classes"),
    ]  # fmt: skip


# -- the cases ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One training with its comparison after the run, or the reason why it could not run."""

    kind: Kind
    precision: str
    checkpoints: bool
    num_micro_batches: int
    optimizer: str
    comparison: Comparison | None = None
    seconds: tuple[float, float] = field(default=(0.0, 0.0))

    @property
    def name(self) -> str:
        technique = "checkpointed" if self.checkpoints else "plain"
        return (
            f"{self.kind.name}, {self.precision}, {technique}, {self.num_micro_batches} x {SAMPLES}, {self.optimizer}"
        )


def cases(only: str | None) -> Iterator[Case]:
    optimizers = ("adamw", "sgd", "adamw")  # an odd number, so that the options meet each of them
    for number, (kind, precision, checkpoints, num_micro_batches) in enumerate(
        product(kinds(), ("fp32", "bf16"), (False, True), (1, 2))
    ):
        if (only is None or only in kind.name) and (kind.can_checkpoint or not checkpoints):
            yield Case(kind, precision, checkpoints, num_micro_batches, optimizers[number % 3])


def tokens_of(data: str | None) -> Tensor:
    """Return token ids for the batches: bytes of a text, or random ids."""
    if data is None:
        return torch.randint(3, VOCABULARY, (1 << 14,), generator=torch.Generator().manual_seed(0))
    text = b"".join(Path(path).read_bytes() for path in sorted(glob.glob(data)))
    return torch.tensor([3 + byte % (VOCABULARY - 3) for byte in text[: 1 << 14]])


def batches_of(kind: Kind, tokens: Tensor, num: int) -> list[Batch]:
    drawn = tokens[: num * SAMPLES * LENGTH].view(num, SAMPLES, LENGTH)
    return [batch_of(kind, input_ids.clone(), number) for number, input_ids in enumerate(drawn)]


def batch_of(kind: Kind, input_ids: Tensor, number: int) -> Batch:
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    lengths = torch.tensor([LENGTH - (number + 2 * sample) % 9 for sample in range(SAMPLES)])
    if "padded" in kind.batch:
        batch["attention_mask"] = (torch.arange(LENGTH) < lengths[:, None]).long()
        batch["labels"] = torch.where(batch["attention_mask"] == 1, input_ids, -100)
    if "classes" in kind.batch:
        batch["labels"] = input_ids[:, 0] % (2 if kind.batch == "padded classes" else 3)
    if kind.batch == "lengths":
        batch |= {"lengths": lengths, "labels": input_ids[:, 0] % 3}
    return batch


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], case: Case) -> None:
    """Run the usual training loop."""
    remaining = iter(batches)
    for _ in range(STEPS):
        for _ in range(case.num_micro_batches):
            with torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16" else nullcontext():
                result = model(**next(remaining))
                loss = result if isinstance(result, Tensor) else result.loss
            (loss / case.num_micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def run(case: Case, tokens: Tensor) -> None:
    """Trace the case, run it, and compare."""
    torch.manual_seed(0)
    model = case.kind.make().train()
    if case.checkpoints:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[case.optimizer]
    optimizer = make(parameters, lr=1e-3)
    batches = batches_of(case.kind, tokens, STEPS * case.num_micro_batches)
    started = time.perf_counter()
    kept: list[Any] = []  # inputs of the measured training stay alive after it, too

    def dry_run(place: DryRun) -> None:
        kept.extend((*place.fake_training(model, optimizer), place.fake_batch(batches)))
        loop(*kept, case)

    predicted = trace_training(dry_run, CpuLowering())
    gc.collect()
    between = time.perf_counter()
    measured = measure_training(lambda run: loop(model, optimizer, run.know_batch(batches), case))
    gc.collect()
    case.seconds = (between - started, time.perf_counter() - between)
    case.comparison = compare(predicted, measured)


# -- the report --------------------------------------------------------------------------------------------------------


def row_of(case: Case) -> list[str]:
    found = case.comparison
    assert found is not None
    return [
        case.name,
        f"{found.predicted.peak_bytes:,}",
        f"{found.measured.peak_bytes:,}",
        f"{found.error_bytes:+,}" if found.error_bytes else "=",
        str(found.num_ops),
        str(found.num_differing_ops),
        difference_text(found.first),
    ]


def difference_text(difference: Difference | None) -> str:
    if difference is None:
        return ""
    made = [
        f"{sign}{format_bytes(block.num_bytes)} {block.shape}"
        for sign, blocks in (
            ("predicted +", difference.only_predicted),
            ("measured +", difference.only_measured),
            ("predicted -", difference.freed_only_predicted),
            ("measured -", difference.freed_only_measured),
        )
        for block in blocks
    ]
    where = difference.moment
    return f"step {where.step} {where.phase}: {where.op} in {where.module or '?'} ({'; '.join(made[:4])})"


HEAD = ("case", "predicted bytes", "measured bytes", "difference", "ops", "ops that differ", "first difference")


def report_of(done: list[Case]) -> str:
    head = ["| " + " | ".join(HEAD) + " |", "| --- | --: | --: | --: | --: | --: | --- |"]
    return "\n".join(head + [f"| {' | '.join(row_of(case))} |" for case in done])


def figures_of(done: list[Case]) -> dict[str, Any]:
    found = [case.comparison for case in done if case.comparison is not None]
    equal = sum(comparison.is_equal for comparison in found)
    alike = sum(comparison.num_differing_ops == 0 for comparison in found)
    worst = max(done, key=lambda case: abs(case.comparison.relative_error) if case.comparison else 0.0)
    return {
        "n": len(done),
        "equal": equal,
        "share_equal": round(equal / len(done), 4),
        "alike_in_every_op": alike,
        "worst": {"case": worst.name, "relative_error": worst.comparison.relative_error if worst.comparison else None},
        "predict_seconds": round(sum(case.seconds[0] for case in done), 1),
        "measure_seconds": round(sum(case.seconds[1] for case in done), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only kinds whose name contains this")
    parser.add_argument("--data", help="pattern of text files (default: random tokens)")
    add_out(parser)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokens, done = tokens_of(arguments.data), []
    for case in cases(arguments.only):
        run(case, tokens)
        done.append(case)
        print("  ".join(row_of(case)), flush=True)
    figures = json.dumps(figures_of(done))
    errors = [abs(case.comparison.relative_error) if case.comparison else math.inf for case in done]
    kinds = {case.name.split(",")[0] for case in done}
    part = errors_table((f"live bytes of small CPU trainings, {len(kinds)} models", errors))
    title = "Predicted and measured live bytes on the CPU"
    file_result(arguments.out, "predict-live", title, f"{report_of(done)}\n\n{fenced(figures)}", part)
    print(figures)


if __name__ == "__main__":
    main()
