"""A recurrent language model on long sequences, planned for budgets from the plain training's need down to a twentieth.

    python benchmarks/recurrent_budgets.py [--data PATH] [--steps 3] [--out table.md]
    python benchmarks/recurrent_budgets.py --samples 1 --length 8192    # no batch to split: only time can be split

The model is an LSTM of 2 layers with 256 units on sequences of 2,048 tokens, with 16 samples per step and 8,000 words.
A share of 0.1 is a tenth of the plain training's predicted memory above the baseline of the process. Each budget is
planned, and the plan runs inside it on real text, in a separate process (`_planned_worker.py`), as in
`plan_budgets.py`. A budget without a plan is reported as impossible, with the smallest possible one.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import pairwise

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

LAYERS = {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256, "num_layers": 2}
SHARES = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
_PLENTY_BYTES = 12 << 30
_SAME = 1.05  # plans with a smaller ratio of seconds count as equally fast


@dataclass(frozen=True)
class Row:
    """One budget, in bytes and seconds."""

    share: float
    budget_bytes: int
    plan: str
    predicted_bytes: int
    measured_bytes: int
    num_ooms: int
    error: str
    predicted_seconds: float
    measured_seconds: float
    plan_seconds: float

    def cells(self) -> list[str]:
        return [
            f"{self.share:g}", f"{self.budget_bytes / MIB:,.0f}", self.plan, f"{self.predicted_bytes / MIB:,.0f}",
            f"{self.measured_bytes / MIB:,.0f}", self.error or str(self.num_ooms), f"{self.predicted_seconds:.2f}",
            f"{self.measured_seconds:.2f}", f"{self.plan_seconds:.0f}",
        ]  # fmt: skip


HEADER = [
    "share of plain", "budget MiB", "plan", "predicted MiB", "measured MiB", "OOM events", "predicted s", "measured s",
    "planning s",
]  # fmt: skip


def budgets_of(training: Training) -> dict[float, int]:
    """Return the budget of each share in whole MiB."""
    from plimsoll.device.cpu.data_limit import MARGIN_BYTES

    plan = training.plan(_PLENTY_BYTES)
    assert plan.plain is not None
    assert plan.plain.peak is not None
    assert plan.prediction is not None
    baseline_bytes = plan.prediction.parts["baseline"]
    beyond_bytes = plan.plain.peak.high_bytes - baseline_bytes
    return {
        share: -(-int(baseline_bytes + MARGIN_BYTES + share * beyond_bytes * 1.006) // MIB) * MIB for share in SHARES
    }


def row_of(training: Training, share: float, budget_bytes: int, steps: int) -> Row:
    started = time.process_time()
    plan = training.plan(budget_bytes)
    plan_seconds = time.process_time() - started
    first = plan.fallbacks[0]
    assert first.peak is not None
    assert first.step_time is not None
    if not plan.fits:
        error = f"impossible: the smallest is {(plan.smallest_budget_bytes or 0) / MIB:,.0f} MiB"
        return Row(
            share, budget_bytes, in_words(first.choices), first.peak.likely_bytes, 0, 0, error,
            first.step_time.likely_seconds, float("nan"), plan_seconds,
        )  # fmt: skip
    with Worker() as worker:
        measured = worker.measure(training.run(plan.choices_by_fallback, steps, budget_bytes))
    return Row(
        share, budget_bytes, in_words(first.choices), first.peak.likely_bytes, measured.peak_bytes, measured.num_ooms,
        measured.error, first.step_time.likely_seconds, measured.step_seconds, plan_seconds,
    )  # fmt: skip


def figures_of(rows: list[Row]) -> dict[str, float | int]:
    done = [row for row in rows if not row.error]
    slower = [later.measured_seconds / earlier.measured_seconds for earlier, later in pairwise(done)]
    return {
        "budgets": len(rows),
        "finished": len(done),
        "under_budget": sum(row.measured_bytes <= row.budget_bytes for row in done),
        "without_oom": sum(row.num_ooms == 0 for row in done),
        "faster_with_less": sum(ratio * _SAME < 1 for ratio in slower),
        "slowest_over_fastest": round(max(row.measured_seconds for row in done) / done[0].measured_seconds, 3),
    }


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=3, help="steps of each training (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=16, help="samples of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample (default: %(default)s)")
    arguments = parser.parse_args()
    one_thread()
    name = f"LSTM 2 x 256, {arguments.samples} x {arguments.length:,} tokens"
    model = Model(name, LAYERS, arguments.length, arguments.samples)
    training = make_training(model, make_texts(arguments.data, arguments.work, [model.rows]))
    rows = [Row(**fields) for fields in kept_rows(arguments.kept)]
    for share, budget_bytes in budgets_of(training).items():
        if any(row.share == share for row in rows):
            continue
        rows.append(row_of(training, share, budget_bytes, arguments.steps))
        print("  ".join(rows[-1].cells()), file=sys.stderr, flush=True)
        keep_rows(arguments.kept, rows)
    text = report_of(
        "Peaks are private memory; seconds are the processor's for one optimizer step, and for the plan.",
        figures_of(rows),
        table(HEADER, [row.cells() for row in rows]),
    )
    what = "recurrent-budgets" if arguments.samples > 1 else "recurrent-budgets-one-sample"
    title = f"Budgets from all to a twentieth of plain: {model.name}, CPU"
    hand_over(rows, figures_of(rows), arguments.out, what, title, text, "")


if __name__ == "__main__":
    ends_with_its_code(main)
