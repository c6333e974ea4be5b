"""What `plimsoll.transformers` costs a Hugging Face `Trainer`, against the same trainer without it.

    python benchmarks/adapters_overhead.py [--rounds 12] [--steps 30] [--milliseconds 50] [--threads 1]

Both arms train copies of one model on the same samples, in rounds that take turns, in an order drawn anew; the first
steps of a round are left out. Compared is the processor time between the begins of two steps, of the whole process: the
ratio of the medians of a round, and over the rounds their median with quartiles. A second arm without the adapter shows
what the method cannot resolve. At the end the weights of all arms must be the same bits.

Does NOT cover CUDA, and what recovering from an OOM costs.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import plimsoll

LENGTH, NUM_WORDS, BATCH_SAMPLES, NUM_SAMPLES, WARM_UP = 64, 500, 8, 512, 5


class Clock(TrainerCallback):
    """Notes the processor time at the begin of each step."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.begins.append(time.process_time())

    def step_seconds(self) -> list[float]:
        """The seconds of each step but the first ones."""
        pairs = zip(self.begins, self.begins[1:], strict=False)
        return [after - before for before, after in pairs][WARM_UP:]


def gpt2(width: int) -> nn.Module:
    ids = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_layer=2, n_embd=width, n_head=4, vocab_size=NUM_WORDS, n_positions=LENGTH, **ids)
    return GPT2LMHeadModel(config)


def run(model: nn.Module, num_steps: int, is_protected: bool) -> float:
    """Train for some steps; returns the median seconds of one."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, NUM_WORDS, (NUM_SAMPLES, LENGTH), generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH_SAMPLES, max_steps=num_steps, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, logging_steps=10,
        )  # fmt: skip
        clock = Clock()
        trainer = Trainer(
            model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids], callbacks=[clock]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        guard: AbstractContextManager[object] = (
            plimsoll.transformers.protected(trainer) if is_protected else nullcontext()
        )
        with guard:
            trainer.train()
    return statistics.median(clock.step_seconds())


def width_for(seconds: float) -> int:
    """The width of a model whose step takes about as long."""
    for width in range(64, 1024, 32):
        if run(gpt2(width), WARM_UP + 6, is_protected=False) >= seconds:
            return width
    return 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30, help="of a round and arm")
    parser.add_argument("--milliseconds", type=float, default=50, help="of a step")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    first = gpt2(width_for(options.milliseconds / 1000))
    arms = {
        "plain": (first, False),
        "plain again": (copy.deepcopy(first), False),
        "adapter": (copy.deepcopy(first), True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(options.rounds):
        for name in random.sample(list(arms), len(arms)):
            model, is_protected = arms[name]
            seconds[name].append(run(model, options.steps, is_protected))
    weights = [torch.cat([tensor.flatten() for tensor in model.state_dict().values()]) for model, _ in arms.values()]
    assert all(torch.equal(weights[0], other) for other in weights[1:]), "the arms did not do the same work"
    table = Table("Arm", "Step (ms)", "Ratio to plain", "Quartiles", title="Trainer, one process, CPU")
    found = {}
    for name, own in seconds.items():
        ratios = [one / plain for one, plain in zip(own, seconds["plain"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        found[name] = {"step_seconds": statistics.median(own), "ratio": statistics.median(ratios)}
        table.add_row(
            name, f"{statistics.median(own) * 1000:.1f}", f"{statistics.median(ratios):.4f}",
            f"{quartiles[0]:.4f} to {quartiles[2]:.4f}",
        )  # fmt: skip
    Console().print(table)
    print(json.dumps({"rounds": options.rounds, "transformers": transformers.__version__, "arms": found}))


if __name__ == "__main__":
    main()
