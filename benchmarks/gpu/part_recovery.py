"""Speed of a training after it ran out of memory: steady steps, and steps after one event.

*Injected*: the first forward pass runs out of memory for a moment (CUDA's own error); otherwise it is the steady
training. *Too large*: the first choice of the plan really does not fit, and the training continues with the next. From
the tenth step after the event on, the median step takes at most `MOST_OF_STEADY` times a steady one.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from benchmarks.gpu.cases import JOB_BATCH_SIZE, JOB_LENGTH, JOB_VOCABULARY
from benchmarks.gpu.parts import Task

from plimsoll import TrainStep
from plimsoll.device.base import backend_for
from plimsoll.records.plan import Choice, Configuration, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.step.failpoints import armed

BUDGET_BYTES, STEPS = 4 << 30, 12
MOST_OF_STEADY = 1.25
_MIB = 1 << 20
_ALL_BLOCKS = Choice(technique="checkpointing", options={"blocks": "all"})


def fallback(samples: int, peak_mib: int, *others: Choice) -> Configuration:
    """Return a fallback with its predicted memory: allocated bytes and a context of 500 MiB."""
    num_bytes = peak_mib * _MIB
    peak = Estimate(likely_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes, traced_bytes=num_bytes)
    return Configuration(choices=(micro_batch_choice(samples), *others), peak=peak)


CHECKPOINTED = (fallback(16, 3435, _ALL_BLOCKS), fallback(4, 2990, _ALL_BLOCKS), fallback(1, 2800, _ALL_BLOCKS))
TRAININGS = {"steady": CHECKPOINTED, "injected": CHECKPOINTED, "too large": (fallback(16, 3900), *CHECKPOINTED)}


def run_part(task: Task) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    backend = backend_for(task.device)
    late: dict[str, float] = {}
    with nullcontext() if task.is_tiny else backend.limited(BUDGET_BYTES):
        for name, fallbacks in TRAININGS.items():
            if task.seconds_left < 10:
                task.not_reached(f"steps after an event: {name}")
                continue
            found = train(fallbacks, task, injects=name == "injected")
            late[name] = statistics.median(seconds for seconds, _ in found["steps"][10:])
            task.say({"id": f"recovery:{name}", "kind": "recovery", **found})
            if name != "steady":
                share = late[name] / late["steady"]
                task.check_on_card(f"late steps after an event: {name}", f"{late[name]:.3f} s, {share:.2f} of steady",
                           MOST_OF_STEADY, share <= MOST_OF_STEADY)  # fmt: skip
            gc.collect()
            backend.release()
            backend.reset_peak()


def train(fallbacks: Sequence[Configuration], task: Task, injects: bool) -> dict[str, Any]:
    """Train, and return the seconds of each step with its fallback, and the number of events."""
    width, layers, length = (32, 2, 32) if task.is_tiny else (768, 12, JOB_LENGTH)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=JOB_VOCABULARY, n_positions=length, n_embd=width, n_layer=layers, n_head=2 if task.is_tiny else 12
    )
    model = transformers.GPT2LMHeadModel(config).train().to(task.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = TrainStep(model, optimizer, units="next-tokens", clip_norm=1.0, precision="bf16", fallbacks=fallbacks)
    ids = torch.arange(JOB_BATCH_SIZE * length).view(JOB_BATCH_SIZE, length) * 7919 % (JOB_VOCABULARY - 2) + 1
    rows: list[tuple[float, int]] = []
    num_events = 0
    for number in range(STEPS + 1):
        with armed("forward", 1) if injects and number == 0 else nullcontext():
            step.backend.synchronize()
            started = time.perf_counter()
            result = step({"input_ids": ids, "labels": ids})
            step.backend.synchronize()
            rows.append((round(time.perf_counter() - started, 4), result.fallback))
            num_events += len(result.oom_events)
    step.close()
    return {"steps": rows, "events": num_events}
