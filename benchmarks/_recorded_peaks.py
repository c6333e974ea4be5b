"""Peaks of `benchmarks/recorded`, predicted without a GPU, for `predict_gpu_recordings.py`.

Kinds of rows: *plain* (forward and backward of one micro-batch), *technique* (a job in `TrainStep` with choices) and
*by hand* (the same job in a plain loop). Each is dry-run as it was recorded (`benchmarks/recorded/README.md`).
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import plan_time_gpu
from plimsoll.memory.allocator.caching import CachingAllocator, replay
from plimsoll.memory.library_buffers import LT_BYTES
from plimsoll.memory.predict import count_on_cuda
from plimsoll.memory.trace import DryRun, trace_training
from plimsoll.planning.targets import gpu_target
from plimsoll.records.prediction import Estimate
from plimsoll.records.trace import Trace

MIB = 2**20
_STEPS = 2
_BATCH_SIZE, _LENGTH, _VOCABULARY = plan_time_gpu.BATCH_SIZE, plan_time_gpu.LENGTH, plan_time_gpu.VOCABULARY


@dataclass(frozen=True)
class RecordedPeak:
    """The peaks of one recorded row in bytes, minus the memory that an earlier run left on the GPU."""

    kind: str
    name: str
    allocated_bytes: int
    reserved_bytes: int
    task: tuple[Any, ...]


def recorded_peaks() -> tuple[list[RecordedPeak], dict[str, str]]:
    """Return the rows with peaks, and the reason for each row that is left out."""
    recorded = json.loads(gzip.decompress(plan_time_gpu.ROWS.read_bytes()))
    rows, left_out = [], {}
    header = recorded["header"]
    is_other_t5 = header["transformers"] != transformers.__version__
    follows = "events"
    for fields in recorded["rows"]:
        if fields["kind"] not in ("plain", "technique") or "error" in fields:
            continue
        row = _row(fields)
        if fields["kind"] == "technique":
            if follows:
                left_out[row.name] = "as the run before had left memory on the card (README there)"
            is_partly_on_host = any(name in fields["choices"] for name in ("optimizer_offload", "layer_streaming"))
            follows = fields["choices"] if is_partly_on_host else ""
        elif is_other_t5 and fields["model"] == "t5-small":
            left_out[row.name] = f"as T5 of transformers {header['transformers']} computes its attention itself"
        if row.name not in left_out:
            rows.append(row)
    return rows + list(_by_hand()), left_out


def _row(fields: dict[str, Any]) -> RecordedPeak:
    if fields["kind"] == "technique":
        name, task = fields["choices"], ("technique", fields["choices"])
    else:
        (timed,) = plan_time_gpu.rows_of(fields)
        name, task = timed.name, timed.task[2:]
    return RecordedPeak(fields["kind"], name, fields["peak"], fields["reserved"], task)


def _by_hand() -> Iterator[RecordedPeak]:
    for fields in csv.DictReader(plan_time_gpu.GRID.read_text("utf-8").splitlines()):
        micro_batch, blocks = int(fields["micro_batch"]), fields["checkpointing"]
        name = f"micro_batch={micro_batch}" + f" + checkpointing={blocks}" * (blocks != "none")
        peaks = (int(fields[f"peak_{what}_mib"]) * MIB for what in ("allocated", "reserved"))
        yield RecordedPeak("by hand", name, *peaks, ("by hand", micro_batch, blocks == "all"))


def predict(task: tuple[Any, ...]) -> tuple[Estimate, Estimate]:
    """Return the predicted peaks of allocated and reserved memory.

    In a plain or technique row, the process had multiplied matrices before: both threads' workspaces existed already.
    """
    trace = _traced(*task)
    counted = count_on_cuda(trace, plan_time_gpu.CARD)
    if task[0] == "by hand":
        return counted.most_allocated, counted.most_reserved
    sizes = (plan_time_gpu.CARD.cublas_workspace_bytes or 0, LT_BYTES) * 2
    given = [(-number, num_bytes) for number, num_bytes in enumerate(sizes, start=1)]
    own = [(storage, num_bytes) for _, storage, num_bytes in trace.deltas()]
    found = replay([*given, *own], CachingAllocator())
    return (
        _moved(counted.most_allocated, found.peak_allocated_bytes),
        _moved(counted.most_reserved, found.peak_reserved_bytes),
    )


def _moved(estimate: Estimate, likely_bytes: int) -> Estimate:
    """Move an estimate's range to another likely value."""
    by = likely_bytes - estimate.likely_bytes
    fields = ("likely_bytes", "low_bytes", "high_bytes", "modelled_bytes")
    return estimate.model_copy(update={name: getattr(estimate, name) + by for name in fields})


def _traced(kind: str, *what: Any) -> Trace:
    if kind == "technique":
        return plan_time_gpu.steps(plan_time_gpu.CARD, plan_time_gpu.choices_of(*what), use_cache=True)
    if kind == "by hand":
        lowering = gpu_target(plan_time_gpu.CARD, None).lowering()
        return trace_training(lambda place: _train_by_hand(place, *what), lowering)
    return plan_time_gpu.traced(plan_time_gpu.CARD, kind, *what)[0]


def _model() -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=_VOCABULARY, n_positions=_LENGTH)
    return transformers.GPT2LMHeadModel(config).train()


def _tokens(num_samples: int) -> torch.Tensor:
    return torch.arange(num_samples * _LENGTH).view(num_samples, _LENGTH) * 7919 % (_VOCABULARY - 2) + 1


def _train_by_hand(place: DryRun, micro_batch: int, checkpoints: bool) -> None:
    model = _model().to("cuda")
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    num_micro_batches = _BATCH_SIZE // micro_batch
    for _ in range(_STEPS):
        optimizer.zero_grad()
        for _ in range(min(num_micro_batches, 2)):  # the following ones are like the second
            tokens = place.fake_batch(_tokens(micro_batch)).to("cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / num_micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
