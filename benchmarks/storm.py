"""Make allocations of training steps fail one after the other, in many kinds of training, and check the outcome.

    python benchmarks/storm.py                        # 7 minutes on 2 cores
    python benchmarks/storm.py --only BatchNorm       # kinds with this in their name or group; --list names them all
    python benchmarks/storm.py --failures 0           # all failures, which takes an hour

Each kind trains a small model, loss, optimizer, loop or plan with more state than weights and gradients, as in real
training code. In the first step, which Plimsoll observes, and in the third, the first allocation fails, in another run
the second, and so on. An allocation fails alone; with the next one, which usually belongs to the undo; or with all that
follow, until no fallback is left. The failing operator creates a new tensor and raises the allocator's own error, from
a request of 2^60 bytes. Then the training continues for a step. Two runs of each kind have no failure: one with whole
batches, one with split batches.

The result must equal, bit for bit, the same training without failures and with the same splits. Compared are
parameters, buffers, optimizer states at any depth, attributes, containers, generators, batches and losses. The
reference is a loop of plain PyTorch, except for techniques of a plan, which have no plain loop (see `_storm_run.py`).
An `OutOfMemoryError` must leave everything as it was before the step; the step is then repeated.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch

import _storm_kept
import _storm_libraries
import _storm_loops
import _storm_losses
import _storm_models
import _storm_optimizers
import _storm_plans
import _storm_recipes
import _storm_states
from _results import add_out, counted, file_result, table
from _storm_run import (
    CHANGED,
    CUT,
    DIFFERENT,
    EQUAL,
    FROM_THERE_ON,
    NAMED,
    NEVER,
    NUM_UPDATES,
    ONCE,
    OUTCOMES,
    RAW,
    TWICE,
    UNCHANGED,
    Kind,
    Plan,
    Trial,
    num_allocations,
    tried,
)

RIGHT = (EQUAL, NAMED, UNCHANGED)
FAULTS = (DIFFERENT, RAW, CHANGED)
EVERY = {ONCE: 1, TWICE: 4, FROM_THERE_ON: 4}
"""The interval of the allocations of a step that fail in this mode: all, or every fourth."""


class Fault(NamedTuple):
    """The first occurrence of a wrong outcome in a kind, and the number of occurrences."""

    kind: str
    plan: Plan
    trial: Trial
    times: int

    def __str__(self) -> str:
        where = f"{self.kind}: step {self.plan.step}, allocation {self.plan.allocation}, {self.plan.how}"
        return f"{where} ({self.times} times alike): {self.trial.outcome}: {self.trial.said} ({self.trial.where})"


@dataclass
class Found:
    """The outcomes of the failures of one kind."""

    group: str
    name: str
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    num_unfailed: int = 0

    @property
    def num_failures(self) -> int:
        return self.outcomes.total() - self.num_unfailed

    def said(self) -> str:
        """Return a summary, followed by the wrong outcomes."""
        num_bad = sum(self.outcomes[outcome] for outcome in FAULTS)
        judged = f"{num_bad} not as they should be" if num_bad else "all as they should be"
        head = f"{self.group}: {self.name}, {self.seconds:.0f} s: {counted(self.num_failures, 'failure')}, {judged}"
        return "\n    ".join([head, *map(str, self.faults)])


@cache
def all_kinds() -> dict[str, Kind]:
    """Return every kind by name, in the order of the table."""
    modules = (
        _storm_models,
        _storm_states,
        _storm_kept,
        _storm_losses,
        _storm_optimizers,
        _storm_recipes,
        _storm_libraries,
        _storm_loops,
        _storm_plans,
    )
    return {f"{kind.group}: {kind.name}": kind for module in modules for kind in module.kinds()}


def plans_of(kind: Kind, most: int) -> list[Plan]:
    """Return the failures of a kind: all, or about ``most``, evenly spread over its steps, allocations and ways."""
    numbers = num_allocations(kind)
    plans = [
        Plan(step, allocation, how)
        for how in EVERY
        for step, number in numbers.items()
        for allocation in range(1, number + 1, EVERY[how] if most else 1)
    ]
    every = max(1.0, len(plans) / most) if most else 1.0
    return [plans[int(place * every)] for place in range(int(len(plans) / every))]


def found_of(name: str, most: int) -> Found:
    """Inject all failures into a kind."""
    kind, started, references = all_kinds()[name], time.time(), {}
    found, faults = Found(kind.group, kind.name), {}
    unfailed = Plan(NUM_UPDATES, how=NEVER)
    first = tried(kind, unfailed, references)
    _freeze()  # objects that this kind has imported
    plans = [unfailed]
    if first.outcome in RIGHT:
        is_planned = "fallbacks" in kind.made().options
        plans += [*([] if is_planned else [unfailed._replace(how=CUT)]), *plans_of(kind, most)]
    for plan in plans:
        trial = first if plan is unfailed else tried(kind, plan, references)
        if trial.outcome:
            found.outcomes[trial.outcome] += 1
            found.num_unfailed += plan.how in (NEVER, CUT)
        if trial.outcome in FAULTS:
            faults.setdefault((trial.outcome, trial.said[:60]), []).append((plan, trial))
    found.faults = [Fault(name, *alike[0], len(alike)) for alike in faults.values()]
    found.seconds = time.time() - started
    return found


def prepare() -> None:
    """Prepare a process: one thread, no warnings, and libraries excluded from garbage collection."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = next(iter(all_kinds().values()))
    tried(first, Plan(1, 5), {})
    _freeze()


def _freeze() -> None:
    """Exclude existing objects from later collections, which follow each failure and would take most of the time."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def stormed(names: Sequence[str], most: int, num_processes: int) -> Iterator[Found]:
    """Yield the results of the kinds, in the order of completion."""
    if num_processes == 1:
        prepare()
        yield from (found_of(name, most) for name in names)
        return
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), prepare) as pool:
        yield from (done.result() for done in as_completed([pool.submit(found_of, name, most) for name in names]))


def rows(found: Sequence[Found], by_group: bool) -> str:
    """Return the table of kinds, or of groups and the total; one column counts wrong outcomes."""
    lines: dict[str, list[Found]] = {}
    for one in found:
        lines.setdefault(one.group if by_group else f"{one.group}: {one.name}", []).append(one)
    if by_group:
        lines["all"] = [*found]
    cells = []
    for name, group in lines.items():
        numbers = [sum(one.outcomes[outcome] for one in group) for outcome in RIGHT]
        wrong = sum(one.outcomes[outcome] for one in group for outcome in FAULTS)
        shown = f"{name}: {_some_of(group)}" if by_group and name != "all" else name
        counts = sum(one.num_unfailed for one in group), sum(one.num_failures for one in group), *numbers, wrong
        cells.append((shown, *([len(group)] if by_group else []), *(f"{one:,}" for one in counts)))
    return table(("training", *(["kinds"] if by_group else []), "not failed", "failed", *RIGHT, "wrong"), cells)


def _some_of(group: Sequence[Found]) -> str:
    """Return a few kinds from the beginning, middle and end of a group."""
    places = dict.fromkeys((0, len(group) // 3, 2 * len(group) // 3))
    return "; ".join(group[place].name for place in places)


def main() -> None:
    """Run the requested kinds, and exit with 1 after any wrong outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="only kinds whose name or group contains this")
    parser.add_argument(
        "--failures",
        type=int,
        default=20,
        metavar="N",
        help="maximum number of failures per kind; 0 for all (default: 20)",
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--list", action="store_true", help="list the kinds and exit")
    add_out(parser)
    arguments = parser.parse_args()
    names = [name for name in all_kinds() if any(part in name for part in arguments.only or [""])]
    if arguments.list or not names:
        print("\n".join(names or all_kinds()))
        return
    found, started = {}, time.time()
    for one in stormed(names, arguments.failures, arguments.processes):
        found[f"{one.group}: {one.name}"] = one
        print(f"[{len(found)}/{len(names)}] {one.said()}", file=sys.stderr, flush=True)
    ordered = [found[name] for name in names]
    faults = [fault for one in ordered for fault in one.faults]
    summary = rows(ordered, by_group=True)
    listed = "\n".join(f"- {fault}" for fault in faults) or "Nothing is not as it should be."
    print(f"{summary}\n\n{listed}\n")
    said = f"{counted(len(ordered), 'kind')} of training, {time.time() - started:.0f} s"
    text = f"{said}.\n\n{rows(ordered, by_group=False)}\n\n{listed}"
    file_result(arguments.out, "storm", "Allocations that fail, one after the other", text, summary, threads=1)
    totals = {outcome: sum(one.outcomes[outcome] for one in ordered) for outcome in OUTCOMES}
    num_failures = sum(one.num_failures for one in ordered)
    print(json.dumps({"kinds": len(ordered), "failures": num_failures, **totals}))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
