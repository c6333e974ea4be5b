"""Savings and cost of gradient caching: in-batch negatives plainly, with it, and as in sentence-transformers.

    PYTHONPATH=src python benchmarks/technique_gradient_cache.py [--samples 64] [--length 128] [--slice 8]

A BERT of 4 layers, built from its config, embeds pairs of random token ids; the loss is that in
`MultipleNegativesRankingLoss`. Live bytes of tensors come from a dry run and from a recorded real run of the same three
steps. Times are processor seconds of the fastest real step without a recorder; the cases take turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import cos_sim
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.planning.dry_run.step import dry_run_step
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques.gradient_cache import gradient_cache_choice

MIB = 2**20
VOCABULARY, WIDTH, LAYERS, SCALE = 2000, 192, 4, 20.0
NUM_STEPS = 3  # as in a dry run
Batch = dict[str, dict[str, Tensor]]
Loss = Callable[[nn.Module, Batch], Tensor]


def encoder_in(folder: Path) -> SentenceTransformer:
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 4 * WIDTH,
    }
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=VOCABULARY, **sizes, **rates)).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(WIDTH)], device="cpu").train()


def drawn(num_samples: int, length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, VOCABULARY, (num_samples, length), generator=generator) for _ in range(2)]
    return {
        name: {"input_ids": one, "attention_mask": torch.ones_like(one)}
        for name, one in zip(("anchor", "positive"), ids, strict=True)
    }


def in_batch(model: nn.Module, batch: Batch) -> Tensor:
    anchors, positives = (model(dict(batch[name]))["sentence_embedding"] for name in ("anchor", "positive"))
    scores = cos_sim(anchors, positives) * SCALE
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def cached(num_samples: int) -> Loss:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        of_model = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=num_samples)
        return of_model([dict(batch["anchor"]), dict(batch["positive"])], None)

    return loss


def recorded_peak_bytes(step: TrainStep, batches: list[Batch]) -> int:
    recorder = Recorder(phase=lambda: "copy" if step.position.phase == "fetch" else step.position.phase)
    with recorder:
        recorder.know_model(step.workload.model)
        for number, batch in enumerate(batches, start=1):
            recorder.step = number
            step(batch)
    return live_bytes(recorder.trace("measured", "cpu")).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--slice", type=int, default=8, help="samples of a slice")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each case")
    options = parser.parse_args()
    whole, in_slices = micro_batch_choice(options.samples), gradient_cache_choice(options.slice)
    cases: dict[str, tuple[Loss, tuple[Choice, ...]]] = {
        "whole batch": (in_batch, (whole,)),
        str(in_slices): (in_batch, (whole, in_slices)),
        f"Cached...Loss({options.slice})": (cached(options.slice), (whole,)),
    }
    batches = [drawn(options.samples, options.length, seed) for seed in range(NUM_STEPS)]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def fresh(name: str) -> TrainStep:
            model = encoder_in(Path(folder))
            loss, choices = cases[name]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            return TrainStep(model, optimizer, loss, units="samples", fallbacks=[choices])

        steps = {name: fresh(name) for name in cases}
        losses = {name: [step(batch).loss for batch in batches] for name, step in steps.items()}
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, step in steps.items():
                started_seconds = time.process_time()
                step(batches[0])
                seconds[name].append(time.process_time() - started_seconds)
        for name, (loss, choices) in cases.items():
            rows[name] = {
                "losses": losses[name],
                "predicted_bytes": None,
                "recorded_bytes": recorded_peak_bytes(fresh(name), batches),
                "step_cpu_seconds": min(seconds[name]),
            }
            if loss is in_batch:  # the other loss computes gradients itself and cannot be dry-run
                step = fresh(name)
                trace = dry_run_step(
                    step.workload.model, step.workload.optimizer, batches[0], loss, CpuLowering(), units="samples",
                    choices=choices, clip_norm=None, precision="fp32",
                )  # fmt: skip
                rows[name]["predicted_bytes"] = live_bytes(trace).peak_bytes
    print(f"{'':20} {'predicted':>12} {'recorded':>12} {'step':>9}  losses")
    for name, row in rows.items():
        predicted = f"{row['predicted_bytes'] / MIB:8.1f} MiB" if row["predicted_bytes"] else "-"
        losses_text = " ".join(f"{loss:.6f}" for loss in row["losses"])
        recorded = row["recorded_bytes"] / MIB
        print(f"{name:20} {predicted:>12} {recorded:8.1f} MiB {row['step_cpu_seconds']:7.2f} s  {losses_text}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
