"""Cost per step of collecting evidence for `plimsoll explain`, and accuracy of the growth that it reports.

    python benchmarks/explain_growth.py [--pairs 60] [--steps 40] [--runs 2000] [--threads 1] [--out table.md]

Cost: one training in one process keeps all its losses with their graphs. Steps come in pairs, in random order: one is
inspected (`plimsoll.step.retained.graphs`), the other is not. The result is the median difference in processor time of
all threads, with a 95 % interval from order statistics. The time inside the inspection itself is shown as well. At most
three of the first inspections walk the graph and read the source; their total extra time is reported separately. From
these numbers follows the share of time in runs of 400 and 4,000 steps, with the real number of inspections.

Growth: trainings keep an object with its graph from step to step. Each is a separate process with the C library's
default heap and without a limit. *Named* is the growth per step in the finding ("at most" includes amounts that cannot
be excluded). *Measured* is the median slope of private memory between two steps (smaps_rollup), without the first
fifth. The same training with detached objects is measured for comparison.

Operations: private memory per operation while its graph is kept, after backward has freed the saved tensors. The graphs
have 2,000 operations on one number each.

Noise: the share of simulated runs without growth in which growth is reported. Simulated are 300 MiB with independent
noise of 20 MiB, the running maximum of it, and a random walk of 5 MiB per step.

Does NOT cover CUDA, and batches of changing lengths.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import plimsoll
from _private_memory import private_bytes
from _results import add_out, file_result
from plimsoll.diagnose.growth import growth_of
from plimsoll.models.hugging_face import TextShape, build_hugging_face
from plimsoll.models.recurrent.model import build_recurrent

VOCABULARY, NUM_SAMPLES, LENGTH = 1000, 8, 64
MIB, KIB = 1 << 20, 1 << 10
NUM_FIRST_LOOKS = 6  # inspections that walk the graph follow two in which nothing is alive yet
NEVER = sys.maxsize  # a step that no training reaches
WARM_UP_SHARE = 1 / 5


class Keeper(nn.Module):
    """A language model that keeps an object in each step."""

    def __init__(self, model: nn.Module, what: str, detaches: bool) -> None:
        super().__init__()
        self.model, self.what, self.detaches = model, what, detaches
        self.history: list[Tensor] = []
        self.mean: Tensor | None = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = self.model(input_ids=input_ids, labels=labels)
        logits = output.logits.detach() if self.detaches else output.logits
        if self.what == "logits":
            self.history.append(logits)
        if self.what == "hidden state":
            mean = logits.mean((0, 1))
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return output


class Losses:
    """A loss function that keeps its results."""

    def __init__(self, detaches: bool) -> None:
        self.detaches = detaches
        self.losses: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        self.losses.append(loss.detach() if self.detaches else loss)
        return loss


def gpt2(num_layers: int, width: int) -> nn.Module:
    fields = {"n_layer": num_layers, "n_embd": width, "n_head": 4}
    return build_hugging_face("gpt2", fields, TextShape(VOCABULARY, None, 0, LENGTH), "cpu")


def lstm() -> nn.Module:
    fields = {"embedding_size": 128, "hidden_size": 128, "num_layers": 2}
    return build_recurrent({"architecture": "lstm", "vocab_size": VOCABULARY, **fields})


MODELS: dict[str, Callable[[], nn.Module]] = {"lstm 2 x 128": lstm, "gpt2 12 x 64": functools.partial(gpt2, 12, 64)}
KEPT = ("losses", "hidden state", "logits")


def make_step(model_name: str, what: str, detaches: bool) -> plimsoll.TrainStep:
    """Build a training that keeps an object in each step; detached, it has the same values and no graph."""
    torch.manual_seed(0)
    model = Keeper(MODELS[model_name](), what, detaches).train()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = (Losses(detaches),) if what == "losses" else ()
    return plimsoll.TrainStep(model, optimizer, *loss, units="next-tokens")


def make_batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


# -- what it costs -----------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Processor seconds of a step; of an inspection (median, interval, and the part inside it); extra of the first
    inspections.
    """

    step: float
    look: float
    low: float
    high: float
    inside: float
    first: float

    def share(self, num_steps: int) -> float:
        """Return the share of the evidence in the time of a run of ``num_steps`` steps."""
        extra = num_looks(num_steps) * self.look + self.first
        return extra / (num_steps * self.step + extra)


class Timed:
    """A wrapper of a function that records the processor time of its last call."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, step: int) -> None:
        begun = time.process_time()
        self._function(step)
        self.seconds = time.process_time() - begun


@functools.cache
def num_looks(num_steps: int) -> int:
    """Count the inspected steps in a run of ``num_steps`` steps, by running a tiny training."""
    model = nn.Linear(1, 1)
    step = plimsoll.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda model, x: model(x).mean(), units="samples"
    )
    for _ in range(num_steps):
        step(torch.ones(1, 1))
    return len(step.graphs.memory)


def measure_cost(model_name: str, num_pairs: int) -> Cost:
    step, batch = make_step(model_name, "losses", detaches=False), make_batch()
    step.graphs.look = timed = Timed(step.graphs.look)  # type: ignore[method-assign]
    without, extra, inside = [], [], []
    for _ in range(num_pairs):
        seconds = {}
        for is_looked_at in random.sample((True, False), 2):
            step.graphs._sampled_steps.next_look = 0 if is_looked_at else NEVER
            begun = time.process_time()
            step(batch)
            seconds[is_looked_at] = time.process_time() - begun
            if is_looked_at:
                inside.append(timed.seconds)
        without.append(seconds[False])
        extra.append(seconds[True] - seconds[False])
    later = extra[NUM_FIRST_LOOKS:]
    usual = statistics.median(inside[NUM_FIRST_LOOKS:])
    first = sum(inside[:NUM_FIRST_LOOKS]) - NUM_FIRST_LOOKS * usual
    return Cost(
        statistics.median(without), statistics.median(later), *interval_of_median(later), usual, max(first, 0.0)
    )


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median, from order statistics."""
    ordered, half_width = sorted(values), 0.98 * len(values) ** 0.5
    low, high = round(len(values) / 2 - half_width), round(len(values) / 2 + half_width)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


# -- whether the growth is that ----------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """Bytes per step; ``named`` and ``at_most`` are None if explain finds nothing or knows no number."""

    measured: float
    named: float | None
    at_most: float | None
    known: str


def measure_growth(model_name: str, what: str, detaches: bool, num_steps: int) -> Growth:
    """Train in this process, and compare the reported growth with that in private memory."""
    step, batch = make_step(model_name, what, detaches), make_batch()
    points = []
    for number in range(num_steps):
        step(batch)
        points.append((number, private_bytes()))
    kept = points[int(len(points) * WARM_UP_SHARE) :]
    slope = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(kept, 2))
    findings = plimsoll.explain(step).findings
    if not findings:
        return Growth(slope, None, None, "nothing found")
    (finding,) = findings
    named, high = finding.effect_bytes, finding.effect_high_bytes
    return Growth(
        slope,
        None if named is None else named / num_steps,
        None if high is None else high / num_steps,
        finding.effect_known or "unknown",
    )


def in_own_process(model_name: str, what: str, detaches: bool, arguments: argparse.Namespace) -> Growth:
    command = [sys.executable, __file__, "--arm", model_name, what, "detached" if detaches else "kept"]
    options = ["--steps", str(arguments.steps), "--threads", str(arguments.threads)]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
    return Growth(*json.loads(done.stdout.splitlines()[-1]))


# -- what an operation takes, and what noise does ----------------------------------------------------------------------


def operation_bytes(
    operation: Callable[[Tensor], Tensor], kept: list[Tensor], num_graphs: int = 12, num_operations: int = 2000
) -> float:
    """Measure private memory per operation: the median increase per kept graph, without the first few graphs."""
    used = []
    for _ in range(num_graphs):
        value = torch.ones(1, 1, requires_grad=True)
        for _ in range(num_operations):
            value = operation(value)
        value.sum().backward()
        kept.append(value)
        used.append(private_bytes())
    return statistics.median((after - before) / num_operations for before, after in pairwise(used[3:]))


def operation_rows(figures: dict[str, Any]) -> list[str]:
    weight, scale = torch.ones(1, 1, requires_grad=True), torch.ones(1, requires_grad=True)
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "tanh": torch.tanh,
        "multiplication": lambda value: value * weight,
        "matrix product": lambda value: torch.mm(value, weight),
        "layer norm": lambda value: functional.layer_norm(value, (1,), scale, scale),
    }
    kept: list[Tensor] = []  # keep all of them alive, because freed memory would be reused
    rows = ["| operation, its graph kept | KiB |", "| --- | --: |"]
    for name, operation in operations.items():
        figures[f"{name}, bytes"] = round(operation_bytes(operation, kept))
        rows.append(f"| {name} | {figures[f'{name}, bytes'] / KIB:.2f} |")
    return rows


def simulated(kind: str, num_steps: int) -> list[tuple[int, int]]:
    noise = [300 * MIB + random.gauss(0, 20 * MIB) for _ in range(num_steps)]
    walk = accumulate((random.gauss(0, 5 * MIB) for _ in range(num_steps)), initial=300 * MIB)
    values = {"independent": noise, "the highest so far": [*accumulate(noise, max)], "a random walk": [*walk][1:]}[kind]
    return [(step, round(value)) for step, value in enumerate(values, start=1)]


def noise_rows(num_runs: int, figures: dict[str, Any]) -> list[str]:
    lengths = (20, 40, 100, 400)
    rows = [
        f"| noise | {' | '.join(f'of {length} steps' for length in lengths)} |",
        "| --- |" + " --: |" * len(lengths),
    ]
    random.seed(0)
    for kind in ("independent", "the highest so far", "a random walk"):
        shares = []
        for length in lengths:
            found = (growth_of(simulated(kind, length)) for _ in range(num_runs))
            shares.append(sum(one is not None and one.is_steady for one in found) / num_runs)
        rows.append(f"| {kind} | {' | '.join(f'{share:.1%}' for share in shares)} |")
        figures[f"called growth: {kind}"] = [round(share, 4) for share in shares]
    return rows


# -- the command -------------------------------------------------------------------------------------------------------


def cost_rows(costs: dict[str, Cost]) -> list[str]:
    rows = [
        "| model | a step, ms of CPU | a look adds (95 %) | inside it | first looks more | of 400 steps | of 4,000 |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, cost in costs.items():
        step, look, low, high, inside, first = (1e3 * seconds for seconds in cost)
        cells = f"{step:.0f} | {look:.2f} ({low:.2f} to {high:.2f}) | {inside:.2f} | {first:.0f}"
        rows.append(f"| {name} | {cells} | {cost.share(400):.2%} | {cost.share(4000):.2%} |")
    return rows


def shown(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:.2f}"


def growth_rows(arguments: argparse.Namespace, figures: dict[str, Any]) -> list[str]:
    rows = [
        "| model | kept | named, MiB a step | at most | known | measured | measured, detached |",
        "| --- | --- | --: | --: | --- | --: | --: |",
    ]
    for model_name in MODELS:
        for what in KEPT:
            kept = in_own_process(model_name, what, False, arguments)
            detached = in_own_process(model_name, what, True, arguments)
            named = f"{shown(kept.named)} | {shown(kept.at_most)} | {kept.known}"
            rows.append(f"| {model_name} | {what} | {named} | {shown(kept.measured)} | {shown(detached.measured)} |")
            print(rows[-1], flush=True)
            figures[f"{model_name}, {what}"] = {
                "named_kib": None if kept.named is None else round(kept.named / KIB),
                "at_most_kib": None if kept.at_most is None else round(kept.at_most / KIB),
                "measured_kib": round(kept.measured / KIB),
                "detached_kib": round(detached.measured / KIB),
                "detached_found": detached.known != "nothing found",
            }
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=int, default=60, help="pairs of steps, of which one is inspected (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each growing training (default: %(default)s)")
    parser.add_argument(
        "--runs", type=int, default=2000, help="simulated runs of each kind and length (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add_out(parser)
    parser.add_argument("--arm", nargs=3, metavar=("MODEL", "KEPT", "HOW"), help="used internally: run one training")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    if arguments.arm:
        model_name, what, how = arguments.arm
        print(json.dumps(measure_growth(model_name, what, how == "detached", arguments.steps)))
        return
    of_operations: dict[str, Any] = {}
    operations = operation_rows(
        of_operations
    )  # first, because a heap that trainings have filled does not grow by such small amounts
    costs = {name: measure_cost(name, arguments.pairs) for name in MODELS}
    tables = cost_rows(costs)
    print("\n".join(tables), flush=True)
    figures: dict[str, Any] = of_operations | {
        name: {
            "step_ms": round(cost.step * 1e3, 1),
            "look_ms": round(cost.look * 1e3, 2),
            "first_looks_ms": round(cost.first * 1e3),
            "share_400": round(cost.share(400), 5),
            "share_4000": round(cost.share(4000), 5),
        }
        for name, cost in costs.items()
    }
    print("\n".join(operations), flush=True)
    noise = noise_rows(arguments.runs, figures)
    print("\n".join(noise), flush=True)
    tables += ["", *operations, "", *noise, "", *growth_rows(arguments, figures)]
    title = "What evidence for `plimsoll explain` costs, and the growth it names"
    file_result(arguments.out, "explain-growth", title, "\n".join(tables))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
