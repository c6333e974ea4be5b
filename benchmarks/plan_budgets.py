"""Planned trainings inside their budgets: 5 models x 6 budgets on the CPU, with the share of memory left unused.

    python benchmarks/plan_budgets.py [--data PATH] [--only gpt2] [--steps 4] [--out table.md]

The first budget of a model is just enough for the plain training. The others have equal ratios, from the need of the
fastest plan down to 1.1 times the smallest feasible budget. On a CPU the fastest plan may need little memory, because
small micro-batches stay in the caches. Each budget is planned, and the plan runs inside it on real text, in a separate
process (`_planned_worker.py`). The peak is private memory: the larger of this process's readings every few milliseconds
and the kernel's high-water mark of each step.

Not covered: evaluation, checkpoints, data loading in several processes. One thread; seconds are of the processor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass

from _planned import (
    MIB,
    Model,
    Training,
    Worker,
    ends_with_its_code,
    hand_over,
    in_words,
    keep_rows,
    kept_rows,
    make_texts,
    make_training,
    one_thread,
    parser_of,
    report_of,
)
from _results import table

MODELS = (
    Model("GPT-2 4 x 256", {"architecture": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4}, 256, 16),
    Model(
        "BERT 4 x 256, classifier",
        {"architecture": "bert", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
         "intermediate_size": 1024},
        128, 32, "classification",
    ),
    Model("T5 3 + 3 x 256", "_rss_worker:t5_wide", 128, 16),
    Model(
        "LSTM 2 x 256, 50k vocabulary",
        {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256, "num_layers": 2}, 64, 16, rows=50257,
    ),
    Model(
        "GRU 256, classifier",
        {"architecture": "gru", "embedding_size": 256, "hidden_size": 256, "num_layers": 1}, 64, 128, "classification",
    ),
)  # fmt: skip
NUM_BUDGETS = 6


@dataclass(frozen=True)
class Row:
    """One combination of model and budget, in bytes and seconds."""

    model: str
    budget_bytes: int
    plan: str
    predicted_bytes: int
    high_bytes: int
    measured_bytes: int
    num_ooms: int
    error: str
    predicted_seconds: float
    measured_seconds: float
    plan_seconds: float
    num_traces: int

    @property
    def unused_share(self) -> float:
        return 1 - self.measured_bytes / self.budget_bytes

    def cells(self) -> list[str]:
        return [
            self.model, f"{self.budget_bytes / MIB:,.0f}", self.plan,
            f"{self.predicted_bytes / MIB:,.0f} (to {self.high_bytes / MIB:,.0f})",
            f"{self.measured_bytes / MIB:,.0f}", f"{self.unused_share:.1%}", self.error or str(self.num_ooms),
            f"{self.predicted_seconds:.2f}", f"{self.measured_seconds:.2f}", f"{self.plan_seconds:.0f}",
        ]  # fmt: skip


HEADER = [
    "model", "budget MiB", "plan", "predicted MiB", "measured MiB", "unused", "OOM events", "predicted s", "measured s",
    "planning s",
]  # fmt: skip


def row_of(training: Training, budget_bytes: int, steps: int) -> Row:
    started = time.process_time()
    plan = training.plan(budget_bytes)
    plan_seconds = time.process_time() - started
    first = plan.fallbacks[0]
    assert first.peak is not None
    assert first.step_time is not None
    with Worker() as worker:
        measured = worker.measure(training.run(plan.choices_by_fallback, steps, budget_bytes))
    return Row(
        training.model.name, budget_bytes, in_words(first.choices), first.peak.likely_bytes, first.peak.high_bytes,
        measured.peak_bytes, measured.num_ooms, measured.error if plan.fits else "impossible; " + measured.error,
        first.step_time.likely_seconds, measured.step_seconds, plan_seconds, plan.num_traces,
    )  # fmt: skip


def figures_of(rows: list[Row]) -> dict[str, float | int]:
    return {
        "cells": len(rows),
        "finished_without_oom": sum(row.num_ooms == 0 and not row.error for row in rows),
        "under_budget": sum(row.measured_bytes <= row.budget_bytes for row in rows),
        "median_unused_share": round(statistics.median(row.unused_share for row in rows), 4),
        "worst_unused_share": round(max(row.unused_share for row in rows), 4),
        "median_step_time_ratio": round(
            statistics.median(row.predicted_seconds / row.measured_seconds for row in rows), 3
        ),
        "longest_planning_seconds": round(max(row.plan_seconds for row in rows), 1),
    }


def report(rows: list[Row]) -> str:
    return report_of(
        "Peaks are private memory; seconds are the processor's for one optimizer step, and for the plan.",
        figures_of(rows),
        table(HEADER, [row.cells() for row in rows]),
    )


def part_of(rows: list[Row]) -> str:
    """Return the part that pages show."""
    figures, by_model = figures_of(rows), Counter(row.model for row in rows)
    return (
        f"- A planned run does not run out of memory: {figures['under_budget']} of {figures['cells']} trainings stayed "
        f"under their budget, {figures['finished_without_oom']} without a memory error on the way; {len(by_model)} "
        f"models in up to {max(by_model.values())} budgets each, of which "
        f"{figures['median_unused_share']:.0%} is left in the median."
    )


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=4, help="steps of each training (default: %(default)s)")
    parser.add_argument("--budgets", type=int, default=NUM_BUDGETS, help="budgets of each model (default: %(default)s)")
    arguments = parser.parse_args()
    one_thread()
    texts = make_texts(arguments.data, arguments.work, [model.rows for model in MODELS])
    rows = [Row(**fields) for fields in kept_rows(arguments.kept)]
    for model in MODELS:
        is_done = sum(row.model == model.name for row in rows) >= arguments.budgets
        if is_done or arguments.only.lower() not in model.name.lower():
            continue
        training = make_training(model, texts)
        for budget_bytes in training.budgets(arguments.budgets):
            if any((row.model, row.budget_bytes) == (model.name, budget_bytes) for row in rows):
                continue
            rows.append(row_of(training, budget_bytes, arguments.steps))
            print("  ".join(rows[-1].cells()), file=sys.stderr, flush=True)
            keep_rows(arguments.kept, rows)
    title = "Planned trainings inside their budgets, CPU"
    hand_over(rows, figures_of(rows), arguments.out, "plan-budgets", title, report(rows), part_of(rows))


if __name__ == "__main__":
    ends_with_its_code(main)
