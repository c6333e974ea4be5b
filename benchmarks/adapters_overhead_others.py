"""Overhead of the adapters for Accelerate and Lightning, against the same loops without them.

    python benchmarks/adapters_overhead_others.py [--rounds 200] [--seconds 120] [--milliseconds 50] [--threads 1]

Accelerate: the documented loop and our step take turns in a random order, one step each per round. Each has a copy of
the model and an AdamW; at the end all weights must be bitwise equal.

Lightning: a trainer owns its loop, so that two trainers cannot take turns. Instead, one trainer gets each batch three
times; the callback is active for one of them, chosen at random. A time runs from the start of the batch to the end of
all callbacks. A logger is installed and called every 50 steps, Lightning's default.

Times are processor time, as in `benchmarks/overhead.py`, whose workloads are used with batches for plain steps of
``--milliseconds``. Results are medians of the ratios within a round, with 95 % intervals. The heap is settled as in
that benchmark. A second copy of the plain loop shows the resolution.

Does NOT cover wall time, CUDA, copies to the device, accumulation, or a memory limit.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import lightning
import numpy as np
import torch
from accelerate import Accelerator
from lightning.pytorch.loggers import CSVLogger
from rich.table import Table
from torch import nn

from overhead import (
    CLIP_NORM,
    NUM_BATCHES,
    SETUPS,
    SHOWN,
    Fields,
    Setup,
    adamw,
    interval,
    make_batches,
    plain_step,
    ratios_of,
    settle_heap,
)
from plimsoll.integrations import accelerate as oom_proof
from plimsoll.integrations.lightning import OomProof

WARM_UP_ROUNDS = 5
Seconds = dict[str, list[float]]


def sized(setup: Setup, seconds: float) -> Setup:
    """Return the workload with a batch size whose plain step takes about ``seconds`` on this machine."""
    model = setup.build().train()
    step = plain_step(setup, model, adamw(model), with_item=True)
    batch = make_batches(None, setup.batch_size)[0]
    taken = statistics.median(timed(lambda: step(batch), seed=number) for number in range(3 * WARM_UP_ROUNDS))
    return replace(setup, batch_size=max(1, round(setup.batch_size * seconds / taken)))


def timed(work: Callable[[], object], seed: int) -> float:
    torch.manual_seed(seed)
    started = time.process_time()
    work()
    return time.process_time() - started


# -- Accelerate --------------------------------------------------------------------------------------------------------


def accelerate_steps(setup: Setup) -> tuple[dict[str, Callable[[Fields], object]], list[nn.Module]]:
    torch.manual_seed(0)
    original, accelerator = setup.build().train(), Accelerator(cpu=True)

    def prepared() -> tuple[Any, Any]:
        model = copy.deepcopy(original)
        return accelerator.prepare(model, adamw(model))

    def plain() -> tuple[Callable[[Fields], object], nn.Module]:
        model, optimizer = prepared()

        def step(batch: Fields) -> None:
            with accelerator.accumulate(model):  # as in Accelerate's documentation
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
                loss.item()

        return step, model

    (one, of_one), (other, of_other), (model, optimizer) = plain(), plain(), prepared()
    ours = oom_proof.step(accelerator, model, optimizer, units="next-tokens", clip_norm=CLIP_NORM)
    steps = {"plain": one, "plain_again": other, "adapter": lambda batch: ours(batch).loss.item()}
    return steps, [of_one, of_other, model]


def measure_accelerate(setup: Setup, num_rounds: int, seconds: float) -> Seconds:
    steps, models = accelerate_steps(setup)
    batches, taken = make_batches(None, setup.batch_size), {name: [] for name in steps}
    end = time.monotonic() + seconds
    for number in range(WARM_UP_ROUNDS + num_rounds):
        batch = batches[number % NUM_BATCHES]
        for name in random.sample([*steps], len(steps)):
            taken[name].append(timed(lambda name=name, batch=batch: steps[name](batch), seed=number))
        if time.monotonic() > end and number > WARM_UP_ROUNDS:
            break
    for model in models[1:]:
        for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
            if not torch.equal(one, other):
                raise SystemExit(f"{setup.name}: the loops did not do the same work: their weights differ")
    return {name: values[WARM_UP_ROUNDS:] for name, values in taken.items()}


# -- Lightning ---------------------------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    """A model as a `LightningModule`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Fields, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)


class First(lightning.Callback):
    """Starts the clock, and removes or restores the adapter before a batch."""

    def __init__(self, adapter: OomProof) -> None:
        self.adapter, self.arms, self.started = adapter, iter(arms_in_turn()), 0.0
        self.arm = ""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.arm = next(self.arms)
        loop, at_work = trainer.fit_loop.epoch_loop.automatic_optimization, self.adapter._at_work
        self.adapter._logs_memory = self.arm == "adapter"
        loop.__dict__.pop("run", None)
        if self.arm == "adapter":
            loop.run = at_work._run
        self.started = time.process_time()


class Last(lightning.Callback):
    """Stops the clock after all callbacks."""

    def __init__(self, first: First) -> None:
        self.first, self.taken = first, {"plain": [], "plain_again": [], "adapter": []}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()
        for parameter in pl_module.parameters():  # free them in each arm: Lightning would in the next step
            parameter.grad = None
        self.taken[self.first.arm].append(time.process_time() - self.first.started)


def arms_in_turn() -> Iterator[str]:
    while True:
        yield from random.sample(["plain", "plain_again", "adapter"], 3)


def measure_lightning(setup: Setup, num_rounds: int, seconds: float) -> Seconds:
    torch.manual_seed(0)
    batches = make_batches(None, setup.batch_size)
    loader = [batches[number // 3 % NUM_BATCHES] for number in range(3 * (WARM_UP_ROUNDS + num_rounds))]
    adapter = OomProof(units="next-tokens")
    last = Last(first := First(adapter))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            max_time={"seconds": seconds},
            gradient_clip_val=CLIP_NORM,
            logger=CSVLogger(folder, flush_logs_every_n_steps=10**9),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[first, adapter, last],
        )
        trainer.fit(Module(setup.build().train()), torch.utils.data.DataLoader(loader, batch_size=None))
    num_whole = min(map(len, last.taken.values()))
    return {name: values[WARM_UP_ROUNDS:num_whole] for name, values in last.taken.items()}


# -- the table ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0, help="maximum for each row")
    parser.add_argument("--milliseconds", type=float, default=50.0, help="processor time of a plain step")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(given.threads)
    settle_heap()
    table = Table(title="processor time of a step with the adapter, relative to the same loop without")
    for name in ("loop", "workload", "plain ms", "adapter", "95 % interval", "plain again", "rounds"):
        table.add_column(name, justify="left" if name in ("loop", "workload") else "right")
    figures: dict[str, float] = {}
    setups = [sized(setup, given.milliseconds / 1000) for setup in SETUPS[:2]]
    for loop, measure in (("accelerate", measure_accelerate), ("lightning", measure_lightning)):
        for setup in setups:
            taken = measure(setup, given.rounds, given.seconds)
            ratios, again = (ratios_of(taken[name], taken["plain"]) for name in ("adapter", "plain_again"))
            low, high = interval(ratios)
            ratio, plain_seconds = float(np.median(ratios)), statistics.median(taken["plain"])
            table.add_row(
                loop, setup.name, f"{plain_seconds * 1e3:.1f}", f"{ratio:.4f}", f"{low:.4f} - {high:.4f}",
                f"{np.median(again):.4f}", str(len(ratios)),
            )  # fmt: skip
            figures[f"{loop} {setup.name}"] = round(ratio, 4)
            figures[f"{loop} {setup.name} plain_step_seconds"] = round(plain_seconds, 5)
    SHOWN.print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
