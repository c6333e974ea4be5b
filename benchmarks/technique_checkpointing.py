"""Savings and cost of checkpointing: GPT-2 with no, every second and all blocks recomputed, predicted and run.

    PYTHONPATH=src python benchmarks/technique_checkpointing.py [--layers 4] [--length 256] [--samples 8]

Live bytes of tensors come from a dry run and from a recorded real run. Times are processor seconds of the fastest real
step without a recorder; the cases take turns. Token ids are random.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.build import build_model
from plimsoll.models.optimizers import build_optimizer
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.job_step import step_of
from plimsoll.step.train_step import TrainStep

MIB = 2**20
TEXTS = TextSketch(vocab_size=8000, num_labels=None, end_id=0)
BLOCKS = ("none", "every 2", "all")
NUM_STEPS = 3  # as in a dry run


def choices_of(blocks: str, num_samples: int) -> tuple[Choice, ...]:
    checkpointing = Choice(technique="checkpointing", options={"blocks": blocks})
    return (*([] if blocks == "none" else [checkpointing]), micro_batch_choice(num_samples))


def fresh(job: Job, blocks: str) -> TrainStep:
    torch.manual_seed(0)
    model = build_model(job, *TEXTS.of_model).train()
    return step_of(job, model, build_optimizer(job.optimizer, model.parameters()), [choices_of(blocks, job.batch_size)])


def recorded_peak_bytes(step: TrainStep, batches: list[dict[str, torch.Tensor]]) -> int:
    recorder = Recorder(phase=lambda: "copy" if step.position.phase == "fetch" else step.position.phase)
    with recorder:
        recorder.know_model(step.workload.model)
        for number, batch in enumerate(batches, start=1):
            recorder.step = number
            step(batch)
    return live_bytes(recorder.trace("measured", "cpu")).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each case")
    options = parser.parse_args()
    model = {"architecture": "gpt2", "n_layer": options.layers, "n_embd": 256, "n_head": 4}
    fields = {"sequence_length": options.length, "batch_size": options.samples, "data": {"train": "nowhere.txt"}}
    job = Job.from_fields({"model": model} | fields)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(8000, (options.samples, options.length), generator=generator) for _ in range(NUM_STEPS)]
    batches = [{"input_ids": one, "labels": one} for one in ids]

    rows = {}
    steps, losses = {}, {}
    for blocks in BLOCKS:
        steps[blocks] = fresh(job, blocks)  # sets the seed: the same dropout
        losses[blocks] = [steps[blocks](batch).loss for batch in batches]
    assert losses["every 2"] == losses["all"] == losses["none"]
    seconds = {blocks: [] for blocks in BLOCKS}
    for _ in range(options.rounds):
        for blocks, step in steps.items():
            started_seconds = time.process_time()
            step(batches[0])
            seconds[blocks].append(time.process_time() - started_seconds)
    print(f"{'blocks':8} {'predicted':>12} {'recorded':>12} {'step':>9}")
    for blocks in BLOCKS:
        predicted = live_bytes(dry_run_job(job, TEXTS, CpuLowering(), choices_of(blocks, options.samples))).peak_bytes
        recorded = recorded_peak_bytes(fresh(job, blocks), batches)
        rows[blocks] = {
            "predicted_bytes": predicted,
            "recorded_bytes": recorded,
            "step_cpu_seconds": min(seconds[blocks]),
        }
        print(f"{blocks:8} {predicted / MIB:8.1f} MiB {recorded / MIB:8.1f} MiB {min(seconds[blocks]):7.3f} s")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
