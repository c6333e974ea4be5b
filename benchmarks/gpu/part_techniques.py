"""The job of `part_job` with each technique alone and with some combinations, in `TrainStep`, for all budgets.

The planner's models of time and memory are compared elsewhere with the recorded seconds, losses and peaks. Here only
losses are compared: none of these techniques changes the training, so the first step's loss equals the first row's.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import transformers
from benchmarks.gpu.cases import JOB_BATCH_SIZE, JOB_LENGTH, JOB_VOCABULARY
from benchmarks.gpu.meter import FAILURES, Meter
from benchmarks.gpu.parts import Row, Task

from plimsoll import TrainStep
from plimsoll.records.plan import Choice
from plimsoll.techniques import in_order
from plimsoll.techniques.mechanisms.building import put_where_needed

STEPS, MOST_SECONDS = 4, 8.0  # of each technique
CLOSE = 1e-3  # relative to the loss, in bf16
_LEAST_SECONDS = 12.0


def micro(samples: int) -> Choice:
    return Choice(technique="micro_batch", options={"samples": samples})


ALL = Choice(technique="checkpointing", options={"blocks": "all"})
EVERY_2 = Choice(technique="checkpointing", options={"blocks": "every 2"})
STATES = Choice(technique="optimizer_offload", options={"to": "host"})
ACTIVATIONS = Choice(technique="activation_offload", options={"to": "host"})
CHUNKS = Choice(technique="chunked_loss", options={"chunk_tokens": 1024})
FUSED = Choice(technique="optimizer_kernel", options={"kernel": "fused"})
STREAMED = Choice(technique="layer_streaming", options={"blocks": "all"})
STREAMED_2 = Choice(technique="layer_streaming", options={"blocks": "every 2"})

SETS = (
    (micro(16),), (micro(16), ALL), (micro(16), STATES), (micro(16), ACTIVATIONS), (micro(16), STREAMED),
    (micro(16), ALL, STREAMED), (micro(16), ALL, STATES), (micro(16), ALL, ACTIVATIONS), (micro(16), CHUNKS),
    (micro(16), FUSED), (micro(16), EVERY_2), (micro(16), ALL, STREAMED_2), (micro(64),),
    (micro(64), ALL), (micro(32), ALL), (micro(8), ALL), (micro(8), ALL, STATES), (micro(16), ALL, CHUNKS),
    (micro(8), ALL, STATES, CHUNKS), (micro(16), ALL, STATES, CHUNKS, STREAMED_2), (micro(8),), (micro(4), ALL),
)  # fmt: skip


def run_part(task: Task) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    meter = Meter(task.device)
    rows = {row["id"]: row for row in task.recorded if row["kind"] == "technique"}
    for choices in SETS:
        words = " + ".join(map(str, choices))
        if (name := f"technique:{words}") in rows:
            continue
        if task.seconds_left < _LEAST_SECONDS:
            task.not_reached(words)
            continue
        rows[name] = {"id": name, "kind": "technique", "choices": words} | trained(task, meter, in_order(choices))
        task.say(rows[name])
    judge(task, list(rows.values()))


def judge(task: Task, rows: list[Row]) -> None:
    failed = [f"{row['choices']}: {row['error']}" for row in rows if row.get("error")]
    losses = {row["choices"]: row["losses"][0] for row in rows if row.get("losses")}
    first = next(iter(losses.values()), 0.0)
    apart = [words for words, loss in losses.items() if abs(loss / first - 1) > CLOSE]
    task.check(f"{len(rows)} sets of techniques", failed[0][:90] if failed else "all train", "all train", not failed)
    task.check("the loss of the first step", ", ".join(apart) or "the same", f"{CLOSE:.0e} apart", not apart)


def trained(task: Task, meter: Meter, choices: tuple[Choice, ...]) -> Row:
    """Train a few steps; an error is stored in ``error``."""
    meter.clean()
    row: Row = {
        "techniques": [one.model_dump() for one in choices], "batch": JOB_BATCH_SIZE, "length": JOB_LENGTH,
        "precision": "bf16", "before": meter.now()[0],
    }  # fmt: skip
    try:
        row |= steps_of(task, meter, choices)
    except FAILURES as error:
        row["error"] = f"{type(error).__name__}: {error}"[:400]
    peaks = meter.peaks()
    return row | {"peak": peaks["peak_allocated_bytes"], "reserved": peaks["peak_reserved_bytes"]}


def steps_of(task: Task, meter: Meter, choices: tuple[Choice, ...]) -> dict[str, Any]:
    width, layers, length = (32, 2, 32) if task.is_tiny else (768, 12, JOB_LENGTH)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=JOB_VOCABULARY, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64 or 1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    put_where_needed(model, task.device.partition(":")[0], choices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = TrainStep(model, optimizer, units="next-tokens", clip_norm=1.0, precision="bf16", fallbacks=[choices])
    ids = torch.arange(JOB_BATCH_SIZE * length).view(JOB_BATCH_SIZE, length) * 7919 % (JOB_VOCABULARY - 2) + 1
    seconds: list[float] = []
    losses: list[float] = []
    while len(seconds) < STEPS and sum(seconds) < MOST_SECONDS:
        meter.wait()
        started = time.perf_counter()
        result = step({"input_ids": ids, "labels": ids})
        meter.wait()
        seconds.append(round(time.perf_counter() - started, 5))
        losses.append(result.loss)
    step.close()
    return {"step_seconds": seconds, "losses": losses, "micro": result.micro_batch, "ooms": len(result.oom_events)}
