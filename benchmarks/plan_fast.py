"""Speed of the chosen plan, compared with all plans of a coarse grid, for 12 combinations of model and budget.

    python benchmarks/plan_fast.py [--data PATH] [--only gpt2] [--rounds 2] [--out table.md]

The grid combines

- micro-batches (powers of two);
- checkpointing (none, every second block, all);
- chunked loss (off, 256 tokens);
- the optimizer kernel (loop, fused);
- the heap (as a budget sets it, or keeping freed memory).

Options that a model does not support are left out. Every plan of the grid is trained once for a few steps inside the
largest budget, to measure its time and private memory. A plan is feasible in a smaller budget if its peak was below it.

For each combination of model and budget, three kinds of plans are then trained inside the budget, in turns: the three
fastest feasible ones, the chosen plan, and the trivial baseline. The least time of each counts. If a plan runs out of
memory, the next one replaces it. The chosen plan is the one after a trial of its candidates, as at the start of
`plimsoll train`; ``--no-trial`` skips the trial.

The trivial baseline is a manual choice: the largest power of two that fits as a micro-batch, and full checkpointing if
none fits, with the heap as a budget sets it. One thread; times are processor seconds of one optimizer step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from _planned import (
    MIB,
    Measured,
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
from plimsoll.records.plan import Choice, Plan, micro_batch_choice

# A model, and the indexes of its six budgets (0 is the largest) that are measured.
MODELS = (
    (Model("GPT-2 4 x 192", {"architecture": "gpt2", "n_layer": 4, "n_embd": 192, "n_head": 4}, 128, 16), (0, 2, 4)),
    (
        Model(
            "BERT 4 x 192, classifier",
            {"architecture": "bert", "num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4,
             "intermediate_size": 768},
            128, 16, "classification",
        ),
        (0, 3),
    ),
    (Model("T5 2 + 2 x 128", "_rss_worker:t5_small", 128, 16), (1, 3)),
    (
        Model(
            "LSTM 128, 50k vocabulary",
            {"architecture": "lstm", "embedding_size": 128, "hidden_size": 128, "num_layers": 1}, 64, 16, rows=50257,
        ),
        (0, 2, 3),
    ),
    (
        Model(
            "GRU 256, classifier",
            {"architecture": "gru", "embedding_size": 256, "hidden_size": 256, "num_layers": 1}, 64, 64,
            "classification",
        ),
        (1, 3),
    ),
)  # fmt: skip
NUM_BUDGETS = 6
NUM_BEST = 3
Combination = tuple[Choice, ...]


@dataclass(frozen=True)
class Row:
    """One combination of model and budget; its plans were timed in the same turns."""

    model: str
    budget_bytes: int
    chosen: str
    predicted_seconds: float
    chosen_seconds: float
    chosen_error: str
    best: str
    best_seconds: float | None
    trivial: str
    trivial_seconds: float | None
    num_feasible: int
    num_grid: int
    num_tried: int = 0
    trial_seconds: float = 0.0

    @property
    def over_best(self) -> float | None:
        return self.chosen_seconds / self.best_seconds - 1 if self.best_seconds else None

    @property
    def over_trivial(self) -> float | None:
        return self.chosen_seconds / self.trivial_seconds - 1 if self.trivial_seconds else None

    def cells(self) -> list[str]:
        over_best = "" if self.over_best is None else f"{self.over_best:+.1%}"
        best = "" if self.best_seconds is None else f"{self.best_seconds:.3f}"
        over_trivial = "" if self.over_trivial is None else f"{self.over_trivial:+.1%}"
        trivial = "" if self.trivial_seconds is None else f"{self.trivial_seconds:.3f}"
        return [
            self.model, f"{self.budget_bytes / MIB:,.0f}", f"{self.chosen} {self.chosen_error}".strip(),
            f"{self.predicted_seconds:.3f}", f"{self.chosen_seconds:.3f}", self.best or "none fits", best,
            over_best, self.trivial or "none fits", trivial, over_trivial,
            f"{self.num_feasible} of {self.num_grid}", f"{self.num_tried}", f"{self.trial_seconds:.1f}",
        ]  # fmt: skip


HEADER = [
    "model", "budget MiB", "chosen", "predicted s", "measured s", "best of the grid", "s", "over it",
    "trivial baseline", "s", "over it", "feasible",
    "tried", "in s",
]  # fmt: skip


# -- the grid ----------------------------------------------------------------------------------------------------------


def grid_of(training: Training, plan: Plan) -> list[Combination]:
    """Return the plans of the grid that suit the model; ``plan`` tells which techniques are impossible."""
    impossible = {one.choices[0].technique for one in plan.rejected if one.peak is None and not one.choices[0].options}
    sizes = [1 << power for power in range(training.model.batch_size.bit_length())]
    blocks = [(), *(_one("checkpointing", blocks=blocks) for blocks in ("every 2", "all"))]
    axes = [
        [(micro_batch_choice(size),) for size in reversed(sizes)],
        blocks if "checkpointing" not in impossible else [()],
        [(), _one("chunked_loss", chunk_tokens=256)] if "chunked_loss" not in impossible else [()],
        [(), _one("optimizer_kernel", kernel="fused")],
        [(), _one("heap", mapped_from="never")],
    ]
    return [tuple(choice for part in parts for choice in part) for parts in product(*axes)]


def _one(technique: str, **options: int | str) -> Combination:
    return (Choice(technique=technique, options=options),)


def trivial_order(grid: Sequence[Combination]) -> Iterator[Combination]:
    """Yield the combinations to try by hand, in order; the grid begins with the largest micro-batches."""
    for others in ((), _one("checkpointing", blocks="all")):
        yield from (combination for combination in grid if combination[1:] == others)


# -- a model -----------------------------------------------------------------------------------------------------------


class Measurer:
    """Trains combinations of one model, and stores their results in each budget."""

    def __init__(self, training: Training, steps: int) -> None:
        self._training, self._steps = training, steps
        self._worker = Worker()
        self.kept: dict[tuple[Combination, int], Measured] = {}

    def measure(self, combination: Combination, budget_bytes: int) -> Measured:
        """Train once more, and keep the least seconds and the highest peak of all times."""
        found = self._worker.measure(self._training.run([combination], self._steps, budget_bytes))
        before = self.kept.get((combination, budget_bytes))
        if before is not None:
            found.peak_bytes = max(found.peak_bytes, before.peak_bytes)
            found.num_ooms += before.num_ooms
            found.error = found.error or before.error
            found.seconds = [float("inf"), min(found.step_seconds, before.step_seconds)]
        self.kept[combination, budget_bytes] = found
        return found

    def tried(self, plan: Plan, budget_bytes: int) -> Plan:
        """Try a plan, train with its fastest candidate in the same process, and return the resulting plan."""
        found = self._worker.measure(self._training.run_tried(plan, self._steps, budget_bytes))
        tried = found.plan or plan
        self.kept[tried.choices, budget_bytes] = found
        return tried

    def close(self) -> None:
        self._worker.__exit__()


def is_good(measured: Measured) -> bool:
    return not measured.error and measured.num_ooms == 0


def rows_of(training: Training, cells: Sequence[int], steps: int, rounds: int, trial: bool) -> Iterator[Row]:
    from plimsoll.device.cpu.data_limit import MARGIN_BYTES

    budgets = training.budgets(NUM_BUDGETS)
    plans = {budgets[cell]: training.plan(budgets[cell]) for cell in cells}
    grid = grid_of(training, next(iter(plans.values())))
    measurer = Measurer(training, steps)
    first = {}
    for combination in grid:
        measured = first[combination] = measurer.measure(combination, budgets[0])
        peak = f"{measured.peak_bytes / MIB:,.0f} MiB"
        print(
            f"  {in_words(combination)}: {measured.step_seconds:.3f} s, {peak} {measured.error}",
            file=sys.stderr,
            flush=True,
        )
    for budget_bytes, untried in plans.items():
        free_bytes = budget_bytes - MARGIN_BYTES
        feasible = [
            combination
            for combination in grid
            if is_good(first[combination]) and first[combination].peak_bytes <= free_bytes
        ]
        by_hand = [combination for combination in trivial_order(grid) if combination in feasible]
        by_time = sorted(feasible, key=lambda combination: first[combination].step_seconds)
        plan = measurer.tried(untried, budget_bytes) if trial else untried
        chosen = plan.choices
        for turn in range(rounds):
            if turn or not trial:
                measurer.measure(chosen, budget_bytes)
            for queue, number in ((by_time, NUM_BEST), (by_hand, 1)):
                _measure_first(measurer, queue, number, budget_bytes, chosen)
        yield _row(training, plan, measurer, budget_bytes, by_time, by_hand, len(feasible), len(grid))
    measurer.close()


def _measure_first(
    measurer: Measurer, queue: list[Combination], number: int, budget_bytes: int, measured: Combination
) -> None:
    """Train the first few plans of a queue, and remove plans that run out of memory."""
    done = 0
    while done < min(number, len(queue)):
        if set(queue[done]) == set(measured) or is_good(measurer.measure(queue[done], budget_bytes)):
            done += 1
        else:
            del queue[done]


def _row(  # one cell
    training: Training, plan: Plan, measurer: Measurer, budget_bytes: int, by_time: list[Combination],
    by_hand: list[Combination], num_feasible: int, num_grid: int,
) -> Row:  # fmt: skip
    chosen = measurer.kept[plan.choices, budget_bytes]

    def seconds(combination: Combination) -> float:
        one = chosen if set(combination) == set(plan.choices) else measurer.kept[combination, budget_bytes]
        return one.step_seconds

    best = min(by_time[:NUM_BEST], key=seconds, default=None)
    assert plan.fallbacks[0].step_time is not None
    tried = plan.trial.tried if plan.trial else ()
    return Row(
        training.model.name, budget_bytes, in_words(plan.choices), plan.fallbacks[0].step_time.likely_seconds,
        chosen.step_seconds, chosen.error or (f"{chosen.num_ooms} OOM" if chosen.num_ooms else ""),
        in_words(best or ()), seconds(best) if best else None,
        in_words(by_hand[0]) if by_hand else "", seconds(by_hand[0]) if by_hand else None, num_feasible, num_grid,
        sum(one.measured_seconds is not None for one in tried), plan.trial.seconds if plan.trial else 0.0,
    )  # fmt: skip


# -- the table ---------------------------------------------------------------------------------------------------------


def figures_of(rows: list[Row]) -> dict[str, float | int]:
    over_trivial = [row.over_trivial for row in rows if row.over_trivial is not None]
    over_best = [row.over_best for row in rows if row.over_best is not None]  # if a plan of the grid fits
    return {
        "cells": len(rows),
        "median_over_best": round(statistics.median(over_best), 4),
        "worst_over_best": round(max(over_best), 4),
        "worst_over_trivial": round(max(over_trivial), 4) if over_trivial else 0.0,
        "median_over_trivial": round(statistics.median(over_trivial), 4) if over_trivial else 0.0,
        "ran_out_of_memory": sum(bool(row.chosen_error) for row in rows),
        "longest_trial_seconds": round(max(row.trial_seconds for row in rows), 1),
    }


def report(rows: list[Row]) -> str:
    return report_of(
        "Seconds of the processor for one optimizer step.",
        figures_of(rows),
        table(HEADER, [row.cells() for row in rows]),
    )


def part_of(rows: list[Row]) -> str:
    """Return the part that pages show."""
    figures = figures_of(rows)
    faster = sorted(-row.over_trivial for row in rows if row.over_trivial is not None)
    return (
        f"- A plan comes near the fastest that fits: {figures['median_over_best']:.1%} slower than the best of a grid "
        f"in the median and {figures['worst_over_best']:.0%} at worst, {faster[0]:.0%} to {faster[-1]:.0%} faster than "
        f"a micro-batch found by hand, in {figures['cells']} cells of model and budget."
    )


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=3, help="steps of each training (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="turns for each model and budget (default: %(default)s)")
    parser.add_argument("--no-trial", action="store_true", help="use the plan that the time model chose")
    arguments = parser.parse_args()
    one_thread()
    texts = make_texts(arguments.data, arguments.work, [model.rows for model, _ in MODELS])
    rows = [Row(**fields) for fields in kept_rows(arguments.kept)]
    for model, cells in MODELS:
        is_done = sum(row.model == model.name for row in rows) == len(cells)
        if is_done or arguments.only.lower() not in model.name.lower():
            continue
        rows = [row for row in rows if row.model != model.name]
        for row in rows_of(
            make_training(model, texts), cells, arguments.steps, arguments.rounds, not arguments.no_trial
        ):
            rows.append(row)
            print("  ".join(row.cells()), file=sys.stderr, flush=True)
            keep_rows(arguments.kept, rows)
    title = "The chosen plan against all of a coarse grid, CPU"
    hand_over(rows, figures_of(rows), arguments.out, "plan-fast", title, report(rows), part_of(rows))


if __name__ == "__main__":
    ends_with_its_code(main)
