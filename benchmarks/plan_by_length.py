"""Savings of splitting a batch by length: passes, token positions and processor time of one step, on realistic lengths.

    python benchmarks/plan_by_length.py [--batch 64] [--micro-batch 8] [--rounds 5] [--out table.md]

A BERT classifier (4 layers, width 256) takes one step on a batch padded to its longest text. The lengths are taken from
the lines of WikiText-2, in tokens, truncated at 128 (`wikitext2_lengths.json`). The time is processor time, the minimum
of the rounds; the methods take turns. The losses are compared too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from _results import add_out, file_result
from plimsoll.models.hugging_face import TextShape, build_hugging_face
from plimsoll.records.plan import Choice
from plimsoll.step.micro_batches import shape_of, weighted_micro_batches
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import installed

LONGEST = 128
CHOICES = {"as it comes": [], "by_length": [Choice(technique="by_length")]}
MODEL = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}


def batch_of(num_samples: int) -> dict[str, torch.Tensor]:
    found = json.loads((Path(__file__).parent / "wikitext2_lengths.json").read_text())
    lengths = torch.tensor(found["tokens"][1:])  # without empty lines
    weights = torch.tensor(found["lines"][1:], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picked = lengths[torch.multinomial(weights, num_samples, replacement=True, generator=generator)]
    mask = (torch.arange(int(picked.max())) < picked[:, None]).long()
    ids = torch.randint(1, 8000, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(num_samples) % 2}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    add_out(parser)
    arguments = parser.parse_args()
    batch = batch_of(arguments.batch)
    torch.manual_seed(0)
    model = build_hugging_face("bert", MODEL, TextShape(8000, 2, 0, LONGEST), "cpu").eval()  # no dropout: same losses
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), units="samples", micro_batch=arguments.micro_batch
    )
    seconds: dict[str, list[float]] = {name: [] for name in CHOICES}
    losses = {}
    for _ in range(arguments.rounds):
        for name, choices in CHOICES.items():
            with installed(step.workload, choices):
                started = time.process_time()
                losses[name] = step(batch).loss
                seconds[name].append(time.process_time() - started)
    lines = ["| cut | passes | token positions | CPU seconds a step |", "| --- | --- | --- | --- |"]
    figures = {}
    for name, choices in CHOICES.items():
        with installed(step.workload, choices):
            shape = shape_of(batch, step.workload)
            micro_batches = [
                one.batch for one in weighted_micro_batches(batch, arguments.micro_batch, shape, step.workload)
            ]
        positions = sum(one["input_ids"].numel() for one in micro_batches)
        figures[name] = {
            "passes": len(micro_batches),
            "positions": positions,
            "cpu_seconds": round(min(seconds[name]), 3),
        }
        lines.append(f"| {name} | {len(micro_batches)} | {positions:,} | {min(seconds[name]):.2f} |")
    print("\n".join(lines))
    file_result(arguments.out, "plan-by-length", "A batch cut by length", "\n".join(lines))
    difference = abs(losses["by_length"] / losses["as it comes"] - 1)
    print(json.dumps({**figures, "loss_difference": difference}))


if __name__ == "__main__":
    main()
