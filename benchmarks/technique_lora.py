"""Savings and cost of a frozen 8-bit base: GPT-2 trained fully, with adapters, and with adapters on an 8-bit base.

    PYTHONPATH=src python benchmarks/technique_lora.py [--layers 6] [--width 256] [--length 256] [--samples 8]

Needs peft. Bytes of tensors come from a dry run and from a recorded real run: ``base`` counts the layers with adapters,
without their biases. Times are processor seconds of the fastest real step without a recorder; the cases take turns.
Token ids are random.
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
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep

MIB = 2**20
TEXTS = TextSketch(vocab_size=8000, num_labels=None, end_id=0)
CASES = ("all", "kept", "int8", "nf4")
NUM_STEPS = 3  # as in a dry run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each case")
    options = parser.parse_args()
    model = {"architecture": "gpt2", "n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 64}
    fields = {"sequence_length": options.length, "batch_size": options.samples, "data": {"train": "nowhere.txt"}}
    job = Job.from_fields({"model": model, "allow": ["lora"]} | fields)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(8000, (options.samples, options.length), generator=generator) for _ in range(NUM_STEPS)]
    batches = [{"input_ids": one, "labels": one} for one in ids]

    seconds = timed({case: fresh(job, case) for case in CASES}, batches[0], options.rounds)
    rows = {case: row_of(job, case, batches) | {"step_cpu_seconds": seconds[case]} for case in CASES}
    print(f"{'trained':8} {'base':>12} {'parameters':>12} {'predicted':>12} {'recorded':>12} {'step':>9}")
    for case, row in rows.items():
        columns = ("base_bytes", "parameter_bytes", "predicted_bytes", "recorded_bytes")
        figures = " ".join(f"{row[column] / MIB:8.2f} MiB" for column in columns)
        print(f"{case:8} {figures} {row['step_cpu_seconds']:7.3f} s")
    print(json.dumps(rows))


def choices_of(case: str, num_samples: int) -> tuple[Choice, ...]:
    """Return the choices to train the whole model, or adapters on a base."""
    lora = Choice(technique="lora", options={"rank": 8, "alpha": 16, "base": case})
    return (*([] if case == "all" else [lora]), micro_batch_choice(num_samples))


def fresh(job: Job, case: str, position: Position | None = None) -> TrainStep:
    torch.manual_seed(0)
    model = build_model(job, *TEXTS.of_model).train()
    optimizer = build_optimizer(job.optimizer, model.parameters())
    return step_of(job, model, optimizer, [choices_of(case, job.batch_size)], position=position)


def timed(steps: dict[str, TrainStep], batch: dict[str, torch.Tensor], num_rounds: int) -> dict[str, float]:
    """Return the seconds of the fastest step of each case; the first step creates the states."""
    seconds: dict[str, list[float]] = {case: [] for case in steps}
    for number in range(num_rounds + 1):
        for case, step in steps.items():
            started_seconds = time.process_time()
            step(batch)
            if number:
                seconds[case].append(time.process_time() - started_seconds)
    for step in steps.values():
        step.close()
    return {case: min(some) for case, some in seconds.items()}


def row_of(job: Job, case: str, batches: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    position = Position()
    recorder = Recorder(phase=lambda: "copy" if position.phase == "fetch" else position.phase)
    with recorder:
        step = fresh(job, case, position)  # the whole model is built first, which can be the peak
        step.install()
        model = step.workload.model
        recorder.know_model(model)
        for number, batch in enumerate(batches, start=1):
            recorder.step = number
            step(batch)
    recorded = live_bytes(recorder.trace("measured", "cpu"))
    sizes = {"base_bytes": base_bytes(model), "parameter_bytes": sum(one.nbytes for one in model.parameters())}
    step.close()
    predicted = live_bytes(dry_run_job(job, TEXTS, CpuLowering(), choices_of(case, job.batch_size)))
    return sizes | {"predicted_bytes": predicted.peak_bytes, "recorded_bytes": recorded.peak_bytes}


def base_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the weights in the blocks, without biases, norms and adapters."""
    frozen = (one for name, one in model.named_parameters() if ".h." in name and "lora_" not in name)
    return sum(one.nbytes for one in frozen if one.dim() == 2)


if __name__ == "__main__":
    main()
