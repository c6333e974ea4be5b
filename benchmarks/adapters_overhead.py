"""Overhead of `plimsoll.transformers` in a Hugging Face `Trainer`, against the same trainer without it.

    python benchmarks/adapters_overhead.py [--rounds 300] [--seconds 300] [--threads 1] [--batch 11]

A trainer owns its loop, so that two trainers cannot take turns step by step. Instead, three arms take turns in the
steps of one trainer, in a random order. The adapter is active in one arm; the other two use the trainer's original
methods. A time runs from the start of a step to the start of the next. It includes the trainer's other work (batches,
clipping, schedule, logs).

Times are processor time, as in `benchmarks/overhead.py`, whose workloads are used with batches for steps of about 50
ms. Results are medians of the ratios within a round, with 95 % intervals. The heap is settled as in that benchmark. The
second plain arm shows the resolution.

Does NOT cover wall time, CUDA, accumulation, a memory limit, or the cost of recovering from an OOM.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from rich.table import Table
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import plimsoll
from overhead import LENGTH, SETUPS, SHOWN, VOCABULARY, Setup, interval, ratios_of, settle_heap

WARM_UP_ROUNDS, NUM_SAMPLES = 5, 128
ARMS = ("plain", "plain_again", "adapter")
Seconds = dict[str, list[float]]
Calls = list[tuple[Any, str, Any]]
"""Objects, attribute names, and their values; None if the object uses the attribute of its class."""


class Bare(nn.Module):
    """A model without its configuration, which a trainer would change, but which is frozen in our recurrent nets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(input_ids=input_ids, labels=labels).loss}


class Turns(TrainerCallback):
    """Starts a step of each arm in turn, with the adapter's methods or the trainer's own."""

    def __init__(self, most_seconds: float) -> None:
        self.trainer: Any = None
        self.taken: Seconds = {name: [] for name in ARMS}
        self._arms, self._arm, self._started = arms_in_turn(), "", 0.0
        self._own: Calls = []
        self._wrapped: Calls = []
        self._end = time.monotonic() + most_seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the trainer's original methods; the adapter wraps the optimizer and accelerator in the first batch."""
        trainer = self.trainer
        self._own = [(trainer, name, None) for name in ("training_step", "compute_loss", "prediction_step", "log")]
        self._own += as_now((trainer.optimizer, "step"), (trainer.accelerator, "backward"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.process_time()
        if state.global_step == 0:
            return
        if state.global_step == 1:
            self._wrapped = as_now(*((owner, name) for owner, name, _ in self._own))
        else:
            self.taken[self._arm].append(now - self._started)
        self._arm = next(self._arms)
        put(self._wrapped if self._arm == "adapter" else self._own)
        control.should_training_stop |= time.monotonic() > self._end
        self._started = time.process_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        put(self._wrapped)


def as_now(*places: tuple[Any, str]) -> Calls:
    return [(owner, name, vars(owner).get(name)) for owner, name in places]


def put(calls: Calls) -> None:
    for owner, name, call in calls:
        if call is None:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = call


def arms_in_turn() -> Iterator[str]:
    while True:
        yield from random.sample(ARMS, len(ARMS))


def measure(setup: Setup, batch_size: int, num_rounds: int, seconds: float) -> Seconds:
    torch.manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH))
    turns, model = Turns(seconds), setup.build()
    model = model if isinstance(model, transformers.PreTrainedModel) else Bare(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch_size, max_steps=3 * (WARM_UP_ROUNDS + num_rounds) + 2,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=50,
            remove_unused_columns=False, dataloader_drop_last=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        turns.trainer = trainer = Trainer(model, arguments, train_dataset=data, callbacks=[turns])
        trainer.remove_callback(transformers.PrinterCallback)
        plimsoll.transformers.fit(trainer)
    num_whole = min(map(len, turns.taken.values()))
    return {name: values[WARM_UP_ROUNDS:num_whole] for name, values in turns.taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=300.0, help="maximum for each row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=11, help="samples per step, of 128 tokens each")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settle_heap()
    table = Table(title="processor time of a Trainer's step with the adapter, relative to one without")
    for name in ("workload", "plain ms", "adapter", "95 % interval", "plain again", "its interval", "rounds"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    figures: dict[str, float] = {}
    for setup in SETUPS[:2]:
        taken = measure(setup, given.batch, given.rounds, given.seconds)
        ratios, again = (ratios_of(taken[name], taken["plain"]) for name in ("adapter", "plain_again"))
        (low, high), (low_again, high_again) = interval(ratios), interval(again)
        ratio, plain_seconds = float(np.median(ratios)), statistics.median(taken["plain"])
        table.add_row(
            setup.name, f"{plain_seconds * 1e3:.1f}", f"{ratio:.4f}", f"{low:.4f} - {high:.4f}",
            f"{np.median(again):.4f}", f"{low_again:.4f} - {high_again:.4f}", str(len(ratios)),
        )  # fmt: skip
        figures[setup.name] = round(ratio, 4)
        figures[f"{setup.name} plain_step_seconds"] = round(plain_seconds, 5)
    SHOWN.print(table)
    print(json.dumps(figures | {"transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
