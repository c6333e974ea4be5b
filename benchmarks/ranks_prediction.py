"""Predicted memory of a rank among several, compared with its private memory.

    python benchmarks/ranks_prediction.py [--cases N] [--measured measured.json] [--out table.md]

Each case trains for a few steps on the CPU over gloo, with one process per rank: plain data-parallel training with
summed gradients, and `fully_shard`. The measured value is the highest private memory of any rank, from the kernel's
high-water mark after each step without mapped files. The prediction is computed as in `plimsoll predict` for the job
with ``ranks: N``, in one process without the other ranks.

``--measured`` stores measurements in a file and reuses them. Not covered: data loading, checkpoints, evaluation, GPUs,
several machines.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _results import add_out, errors_table, file_result
from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.base import backend_for
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.planning.baseline import job_baseline
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.planning.targets import Target
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques.checkpointing import checkpointing_choice
from predict_cpu_rss import BUDGET_BYTES, MIB, NUM_STEPS, Case, bert, gpt2, recurrent

HERE = Path(__file__).parent
TARGET_ERROR = 0.05
ONCE, TWICE = (Choice(technique="fully_shard", options={"gathered": gathered}) for gathered in ("once", "twice"))
RECOMPUTED = checkpointing_choice("all")


@dataclass(frozen=True)
class Shared:
    """A case of one process, whose batch is divided among ``num_ranks`` ranks."""

    case: Case
    num_ranks: int
    others: tuple[Choice, ...] = ()

    @property
    def name(self) -> str:
        """The name that identifies the case."""
        how = " ".join(map(str, self.others)) or "data-parallel"
        return f"{self.case.name}, {self.num_ranks} ranks, {how}"

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices of each rank."""
        share = -(-self.case.shape[0] // self.num_ranks)
        return (*self.others, micro_batch_choice(min(self.case.micro_batch or share, share)))

    def job(self) -> Job:
        """Return the job of all ranks."""
        return self.case.job().model_copy(update={"ranks": self.num_ranks})

    def run(self) -> str:
        """Return the input of each rank's process."""
        fields = json.loads(self.case.run(is_limited=True))
        choices = [choice.model_dump() for choice in self.choices]
        return json.dumps(fields | {"job": self.job().to_json(), "choices": choices})


SMALL = Case("gpt2-2x128", gpt2(2, 128), (16, 64), vocab_size=2000)
MIDDLE = Case("gpt2-4x256", gpt2(4, 256), (16, 128))
DEEP = Case("gpt2-12x384", gpt2(12, 384), (8, 64))
PIECES = Case("gpt2-4x256-micro2", gpt2(4, 256), (30, 128), micro_batch=2)
TEXTS = Case("bert-6x256-30k", bert(6, 256), (16, 128), vocab_size=30000, num_labels=2)
LAYERS = Case("lstm-2x512", recurrent("lstm", 2, 512), (16, 128), vocab_size=20000)
CASES = (
    Shared(MIDDLE, 2),
    Shared(MIDDLE, 2, (ONCE,)),
    Shared(MIDDLE, 2, (TWICE,)),
    Shared(DEEP, 2),
    Shared(DEEP, 2, (ONCE,)),
    Shared(DEEP, 3, (TWICE,)),
    Shared(DEEP, 4, (TWICE,)),
    Shared(TEXTS, 2),
    Shared(TEXTS, 3, (TWICE,)),
    Shared(PIECES, 3),
    Shared(PIECES, 3, (ONCE,)),
    Shared(LAYERS, 2),
    Shared(SMALL, 4),
    Shared(SMALL, 4, (TWICE,)),
    Shared(DEEP, 4),
    Shared(MIDDLE, 2, (RECOMPUTED,)),
    Shared(DEEP, 2, (RECOMPUTED, TWICE)),
    Shared(PIECES, 2, (RECOMPUTED, ONCE)),
)


def measured_bytes(one: Shared) -> int:
    """Train, and return the highest private memory of any rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(one.num_ranks),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / "_rss_worker.py"],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(one.num_ranks)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(one.run())
        rank.stdin.close()
        rank.stdin = None
    peaks = []
    for rank in ranks:
        lines, errors = rank.communicate()
        if rank.returncode:
            raise SystemExit(
                f"{one.name}: a rank ended with {rank.returncode}: {errors[-2000:]}; fix the cause and run again"
            )
        steps = [json.loads(line) for line in lines.splitlines()]
        assert [step["ooms"] for step in steps] == [0] * NUM_STEPS
        peaks.append(max(step["peak_bytes"] for step in steps))
    return max(peaks)


def predicted_bytes(one: Shared) -> tuple[int, int]:
    """Return the predicted bytes of one rank, and the live tensors among them."""
    case, job = one.case, one.job()
    texts = TextSketch(vocab_size=case.vocab_size, num_labels=case.num_labels, end_id=0)
    trace = dry_run_job(job, texts, CpuLowering(), one.choices)
    device = backend_for("cpu").probe()
    target = Target(
        name=device.name, capacity_bytes=device.capacity_bytes, limit_bytes=BUDGET_BYTES, limit_source="the budget",
        baseline=job_baseline(job), has_budget=True,
    )  # fmt: skip
    return target.count(trace, one.choices).peak.likely_bytes, live_bytes(trace).peak_bytes


def main() -> None:
    """Measure, predict, and print a table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cases", type=int, default=len(CASES))
    options.add_argument("--measured", type=Path)
    add_out(options)
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    known: dict[str, int] = {}
    if given.measured is not None and given.measured.is_file():
        known = json.loads(given.measured.read_text())
    rows: list[dict[str, Any]] = []
    for one in CASES[: given.cases]:
        if one.name not in known:
            known[one.name] = measured_bytes(one)
            if given.measured is not None:
                given.measured.write_text(json.dumps(known, indent=1))
        predicted, live = predicted_bytes(one)
        error = predicted / known[one.name] - 1
        rows.append(
            {"case": one.name, "measured": known[one.name], "predicted": predicted, "live": live, "error": error}
        )
        print(
            f"{one.name}: {known[one.name] / MIB:.0f} MiB, predicted {predicted / MIB:.0f} ({error:+.1%})", flush=True
        )
    table = [
        "| case | measured MiB | predicted MiB | of these live tensors | error |",
        "| --- | --: | --: | --: | --: |",
    ]
    table += [
        f"| {row['case']} | {row['measured'] / MIB:.0f} | {row['predicted'] / MIB:.0f} | {row['live'] / MIB:.0f} "
        f"| {row['error']:+.1%} |"
        for row in rows
    ]
    errors = [abs(row["error"]) for row in rows]
    text = "\n".join(table)
    print(text)
    part = errors_table(("private memory of each of several CPU processes that share a batch, 2 to 4", errors))
    title = "Predicted and measured private memory of several ranks"
    file_result(given.out, "ranks-prediction", title, text, part)
    answer = {
        "cases": len(rows), "median_error": round(statistics.median(errors), 4), "worst_error": round(max(errors), 4),
        "target": TARGET_ERROR, "is_met": statistics.median(errors) <= TARGET_ERROR,
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
