"""Overhead of Plimsoll's step and monitor, compared with the plain PyTorch loop doing the same work.

    python benchmarks/overhead.py [--rounds 300] [--seconds 180] [--threads 1] [--parts] [--sizes] [--data PATTERN]

The arms run in one process and take turns in a random order, one step per round. Each has a copy of the model and an
AdamW; batches and random numbers are equal. At the end all weights must be bitwise equal, which proves that every arm
did the same work. The result is the ratio to the plain loop's step of the same round: the median over the rounds with
its 95 % interval (from order statistics), and the 10th and 90th percentile of single rounds.

The plain loop is careful user code: zero_grad, forward, loss, backward, clip_grad_norm_, step, and one ``loss.item()``
for logging. A second copy of it is another arm and shows the resolution of the method.

The result is the *processor time* of the whole process with all threads. The wall time is shown as well: it is the time
that a user waits, but on a shared machine it includes the work of other programs.

The C library is told to keep freed memory (`settle_heap`) in all arms. By default it returns the top of the heap to the
system and takes it again if a large block happens to lie there. This randomly costs a step of any arm up to a tenth (0
to 7,000 page faults; the plain loop had more than Plimsoll's in some processes and fewer in others).

Does NOT cover the memory limit (it holds for a process, so it cannot differ between arms), fetching, checkpoints, and
CUDA. The arms do not draw the live panel, because arms that take turns would draw it too often: the monitored arm
prints lines, as in a log, and ``--parts`` measures the panel.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import functools
import glob
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn

from _results import add_out, fenced, file_result, keep_printed
from _results import table as markdown
from plimsoll.data.batch import count_units, split_batch
from plimsoll.data.batches.loader import Batch
from plimsoll.device.base import backend_for
from plimsoll.models.hugging_face import TextShape, build_hugging_face
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.records.run import StepLine
from plimsoll.report.as_text import live_panel
from plimsoll.step.train_step import TrainStep
from plimsoll.training.loop import Training, note_step
from plimsoll.training.monitor import MemorySampler, View
from plimsoll.training.run_directory import RunDirectory

VOCABULARY, LENGTH, CLIP_NORM, LEARNING_RATE = 1000, 128, 1.0, 3e-4
NUM_BATCHES, WARM_UP_ROUNDS = 8, 5
SAMPLE_SECONDS, DRAWS_PER_SECOND = 0.05, 4  # as in plimsoll.training.monitor
SHOWN = Console(width=118)

Fields = dict[str, Tensor]
Step = Callable[[Fields], object]


@dataclass(frozen=True)
class Setup:
    """A model, the number of samples of 128 tokens per step, and the number of micro-batches."""

    name: str
    build: Callable[[], nn.Module]
    batch_size: int = 16
    num_micro_batches: int = 1


@dataclass
class Arm:
    """One implementation of the steps, with a model and an optimizer, and the times of its steps."""

    name: str
    key: str
    model: nn.Module
    step: Step
    watched: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    processor_seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)

    def run(self, batch: Fields, seed: int) -> None:
        """Perform one step and record its time; the random wait moves the sampler's ticks within the step."""
        with self.watched():
            time.sleep(random.uniform(0, SAMPLE_SECONDS))
            torch.manual_seed(seed)
            wall, processor = time.perf_counter(), time.process_time()
            self.step(batch)
            self.processor_seconds.append(time.process_time() - processor)
            self.wall_seconds.append(time.perf_counter() - wall)


# -- what is trained ---------------------------------------------------------------------------------------------------


def gpt2(num_layers: int, width: int) -> nn.Module:
    fields = {"n_layer": num_layers, "n_embd": width, "n_head": 4}  # dropout is 0.1 everywhere, GPT-2's default
    return build_hugging_face("gpt2", fields, TextShape(VOCABULARY, None, 0, LENGTH), "cpu")


def lstm() -> nn.Module:
    fields = {"embedding_size": 128, "hidden_size": 128, "num_layers": 2, "dropout": 0.1}
    return build_recurrent({"architecture": "lstm", "vocab_size": VOCABULARY, **fields})


small_gpt2 = functools.partial(gpt2, 2, 64)
SETUPS = (
    Setup("gpt2", small_gpt2),
    Setup("lstm", lstm),
    Setup("gpt2 in 4 micro-batches", small_gpt2, num_micro_batches=4),
)


def make_batches(pattern: str | None, batch_size: int) -> list[Fields]:
    """Make batches of the files' bytes as tokens, or of random tokens: speed does not depend on their values."""
    num_tokens = NUM_BATCHES * batch_size * LENGTH
    if pattern is None:
        tokens = torch.randint(0, VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(0))
    else:
        content = b"".join(Path(path).read_bytes() for path in sorted(glob.glob(pattern)))
        if len(content) < num_tokens:
            raise SystemExit(f"{pattern} has {len(content)} bytes, but {num_tokens} are needed: give more text")
        tokens = torch.from_numpy(np.frombuffer(content, dtype=np.uint8, count=num_tokens).astype(np.int64))
    return [{"input_ids": ids, "labels": ids} for ids in tokens.view(NUM_BATCHES, batch_size, LENGTH)]


# -- the arms ----------------------------------------------------------------------------------------------------------


def plain_step(setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, with_item: bool) -> Step:
    """Return a step of the plain loop; samples have equal lengths, so all micro-batches have the same weight."""
    size = setup.batch_size // setup.num_micro_batches

    def step(batch: Fields) -> None:
        optimizer.zero_grad()
        total = torch.zeros(())
        for start in range(0, setup.batch_size, size):
            micro_batch = {name: tensor[start : start + size] for name, tensor in batch.items()}
            loss = model(**micro_batch).loss / setup.num_micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if with_item:
            total.item()

    def whole_step(batch: Fields) -> None:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if with_item:
            loss.item()

    return whole_step if setup.num_micro_batches == 1 else step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def train_step(setup: Setup, model: nn.Module) -> TrainStep:
    micro_batch = None if setup.num_micro_batches == 1 else setup.batch_size // setup.num_micro_batches
    return TrainStep(model, adamw(model), units="next-tokens", micro_batch=micro_batch, clip_norm=CLIP_NORM)


class Monitored:
    """A step of `plimsoll train`, with the sampler running, the metrics written and a line printed."""

    def __init__(self, step: TrainStep, folder: Path, num_steps: int) -> None:
        with contextlib.redirect_stderr((folder / "log.txt").open("w")):  # a View prints to the stderr at its creation
            view = View("overhead", num_steps, "tokens")
        self._training = Training(
            job=None,  # not used by `note_step`
            parts=None,
            step=step,
            directory=RunDirectory.create(folder / "run", force=False),
            fingerprint={},
            sampler=MemorySampler(step.backend),
            view=view,
        )

    def __call__(self, batch: Fields) -> None:
        result = self._training.step(batch)
        note_step(self._training, _as_loaded(batch), result)

    def watched(self) -> contextlib.AbstractContextManager[object]:
        self._training.sampler = MemorySampler(self._training.backend)
        return self._training.sampler.running()


def _as_loaded(batch: Fields) -> Batch:
    return Batch(batch, np.arange(len(batch["input_ids"])), epoch=0, first_sample=0)


def make_arms(setup: Setup, folder: Path, num_steps: int) -> list[Arm]:
    torch.manual_seed(0)
    original = setup.build().train()

    def plain(name: str, key: str, with_item: bool = True) -> Arm:
        model = copy.deepcopy(original)
        return Arm(name, key, model, plain_step(setup, model, adamw(model), with_item))

    step = train_step(setup, copy.deepcopy(original))
    monitored = Monitored(train_step(setup, model := copy.deepcopy(original)), folder, num_steps)
    return [
        plain("plain loop", "plain"),
        plain("plain loop, second copy", "plain_again"),
        plain("plain loop without loss.item()", "plain_without_item", with_item=False),
        Arm("Plimsoll's step", "without_monitor", step.workload.model, step),
        Arm("Plimsoll's step and monitor", "with_monitor", model, monitored, monitored.watched),
    ]


def compare(setup: Setup, pattern: str | None, num_rounds: int, seconds: float) -> list[Arm]:
    """Run all arms round by round; the first one is the reference."""
    batches = make_batches(pattern, setup.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        arms = make_arms(setup, Path(folder), num_rounds)
        end = time.monotonic() + seconds
        for number in range(WARM_UP_ROUNDS + num_rounds):
            for arm in random.sample(arms, len(arms)):
                arm.run(batches[number % NUM_BATCHES], seed=number)
            if time.monotonic() > end and number > WARM_UP_ROUNDS:
                break
    for arm in arms:
        del arm.processor_seconds[:WARM_UP_ROUNDS], arm.wall_seconds[:WARM_UP_ROUNDS]
        _check_same_weights(arms[0], arm)
    return arms


def _check_same_weights(one: Arm, other: Arm) -> None:
    for name, tensor in one.model.state_dict().items():
        if not torch.equal(tensor, other.model.state_dict()[name]):
            raise SystemExit(f"the arms {one.name!r} and {other.name!r} did not do the same work: {name} differs")


# -- the ratios --------------------------------------------------------------------------------------------------------


def ratios_of(seconds: list[float], plain_seconds: list[float]) -> np.ndarray:
    return np.sort(np.divide(seconds, plain_seconds))


def interval(sorted_ratios: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the median: the number of n values below it is binomial, n / 2 +- 0.98 sqrt(n)."""
    half, spread = len(sorted_ratios) / 2, 0.98 * len(sorted_ratios) ** 0.5
    last = len(sorted_ratios) - 1
    return sorted_ratios[max(0, round(half - spread))], sorted_ratios[min(last, round(half + spread))]


def figures_of(arms: list[Arm]) -> dict[str, float | int]:
    plain, *others = arms
    figures: dict[str, float | int] = {
        arm.key: round(float(np.median(ratios_of(arm.processor_seconds, plain.processor_seconds))), 4) for arm in others
    }
    figures["plain_step_seconds"] = round(statistics.median(plain.processor_seconds), 5)
    figures["rounds"] = len(plain.processor_seconds)
    return figures


def table_of(setup: Setup, arms: list[Arm]) -> Table:
    plain = arms[0]
    table = Table(title=f"{setup.name}: {setup.batch_size * LENGTH} tokens per step, {len(plain.wall_seconds)} rounds")
    table.add_column("arm")
    for name in ("ms per step", "ratio", "95 % interval", "10th - 90th", "wall ms", "wall ratio"):
        table.add_column(name, justify="right")
    for arm in arms:
        ratios = ratios_of(arm.processor_seconds, plain.processor_seconds)
        low, high = interval(ratios)
        tenth, ninetieth = np.percentile(ratios, [10, 90])
        wall_ratio = np.median(ratios_of(arm.wall_seconds, plain.wall_seconds))
        table.add_row(
            arm.name,
            f"{statistics.median(arm.processor_seconds) * 1e3:.1f}",
            f"{np.median(ratios):.4f}",
            f"{low:.4f} - {high:.4f}",
            f"{tenth:.3f} - {ninetieth:.3f}",
            f"{statistics.median(arm.wall_seconds) * 1e3:.1f}",
            f"{wall_ratio:.4f}",
        )
    return table


# -- the parts of the overhead -----------------------------------------------------------------------------------------


def cost_of(work: Callable[[], object], repeats: int = 200) -> float:
    """Return the median processor seconds of one call."""
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


@dataclass(frozen=True)
class CommitCost:
    """Median processor seconds of a plain step, its ``optimizer.step()``, and the commit that replaces it."""

    step_seconds: float
    update_seconds: float
    commit_seconds: float

    @property
    def extra_seconds(self) -> float:
        return self.commit_seconds - self.update_seconds


def commit_cost(step: TrainStep, batch: Fields, repeats: int) -> CommitCost:
    """Alternate between the optimizer's step and the commit, each after a forward and backward pass."""
    model, optimizer = step.workload.model, step.workload.optimizer
    steps, updates, commits = [], [], []
    for number in range(2 * repeats + 2):
        started = time.process_time()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        before = time.process_time()
        (step._commit if number % 2 else optimizer).step()
        after = time.process_time()
        if number >= 2:  # the first two create the states
            (commits if number % 2 else updates).append(after - before)
            steps.append(after - started)
    return CommitCost(statistics.median(steps[::2]), statistics.median(updates), statistics.median(commits))


def part_costs(setup: Setup, pattern: str | None) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the seconds of a plain step, and for each part its number per step and its seconds.

    Except for the commit, repeated calls find their data in the cache; in a step they take somewhat longer.
    """
    batch = make_batches(pattern, setup.batch_size)[0]
    size = setup.batch_size // setup.num_micro_batches
    with tempfile.TemporaryDirectory() as folder:
        step = train_step(setup, setup.build().train())
        training = Monitored(step, Path(folder), num_steps=10**9)._training
        result = step(batch)
        commit = commit_cost(step, batch, repeats=60)
        parts = {
            "look at the batch and cut it": (1, cost_of(lambda: cut(step, batch, size))),
            "remember random numbers and buffers": (1, cost_of(step._retry.undo.remember)),
            "commit, beyond the optimizer's own step": (1, commit.extra_seconds),
            "monitor: write the step down": (1, cost_of(lambda: note_step(training, _as_loaded(batch), result))),
            "monitor: a memory sample": (commit.step_seconds / SAMPLE_SECONDS, cost_of(training.sampler.sample)),
            "monitor: draw the live panel": (min(1, commit.step_seconds * DRAWS_PER_SECOND), panel_seconds(training)),
        }
    return commit.step_seconds, parts


def cut(step: TrainStep, batch: Fields, size: int) -> list[float]:
    """Compute the weight of each micro-batch as `TrainStep` does."""
    num_units = step._shape_of(batch).num_units
    return [count_units(micro_batch, "next-tokens") / num_units for micro_batch in split_batch(batch, size)]


def panel_seconds(training: Training) -> float:
    """Return the processor seconds for drawing the live panel once, as `View` does."""
    line = next(line for line in training.directory.lines() if isinstance(line, StepLine))
    memory = {"device": training.backend.use()}
    with open(os.devnull, "w") as nowhere:
        live = Live(console=Console(file=nowhere, force_terminal=True, width=100), auto_refresh=False, transient=True)
        with live:
            return cost_of(
                lambda: live.update(live_panel("overhead", line, 1000, memory, 60.0), refresh=True), repeats=60
            )


def part_table(setup: Setup, step_seconds: float, parts: dict[str, tuple[float, float]]) -> Table:
    table = Table(title=f"{setup.name}: the parts, of a plain step of {step_seconds * 1e3:.1f} ms")
    table.add_column("part")
    for name in ("microseconds", "times per step", "share of the step"):
        table.add_column(name, justify="right")
    for name, (times, seconds) in parts.items():
        table.add_row(name, f"{seconds * 1e6:.0f}", f"{times:.2f}", f"{times * seconds / step_seconds:.2%}")
    return table


# -- the commit for other sizes ----------------------------------------------------------------------------------------


def measure_sizes() -> tuple[Table, dict[str, float]]:
    """Measure the commit's share of a step for 1 and 10 million parameters and batches of 256 to 4,096 tokens."""
    table = Table(title="the commit beyond the optimizer's own step, as a share of the plain step")
    for name in (
        "parameters",
        "tokens per step",
        "step ms",
        "optimizer ms",
        "commit beyond it ms",
        "share of the step",
    ):
        table.add_column(name, justify="right")
    shares = {}
    for num_layers, width in ((4, 132), (6, 360)):
        model = gpt2(num_layers, width).train()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        for num_tokens in (256, 1024, 4096):
            setup = Setup("", lambda model=model: model, batch_size=num_tokens // LENGTH)
            batch = make_batches(None, setup.batch_size)[0]
            cost = commit_cost(train_step(setup, model), batch, repeats=max(6, 20480 // num_tokens))
            share = cost.extra_seconds / cost.step_seconds
            milliseconds = [f"{s * 1e3:.2f}" for s in (cost.step_seconds, cost.update_seconds, cost.extra_seconds)]
            table.add_row(f"{num_parameters / 1e6:.1f} M", f"{num_tokens:,}", *milliseconds, f"{share:.2%}")
            shares[f"{num_parameters} parameters, {num_tokens} tokens"] = round(share, 4)
    return table, shares


# -- the command -------------------------------------------------------------------------------------------------------


def settle_heap() -> None:
    """Make glibc neither map blocks nor return memory (see the module docstring); do nothing in other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX, of malloc.h
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def circumstances() -> str:
    """Describe the machine, its load and the versions."""
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    return (
        f"{device_name()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads used, load {load}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


def device_name() -> str:
    return backend_for("cpu").probe().name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=300, help="maximum number of rounds per workload (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=180, help="maximum seconds per workload (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--parts", action="store_true", help="also measure each part of the overhead separately")
    parser.add_argument("--sizes", action="store_true", help="also measure the commit for other models and batches")
    parser.add_argument("--data", help="pattern of text files (default: random tokens)")
    add_out(parser)
    arguments = parser.parse_args()
    printed = keep_printed()
    settle_heap()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    SHOWN.print(circumstances())
    figures: dict[str, dict[str, float]] = {}
    for setup in SETUPS:
        arms = compare(setup, arguments.data, arguments.rounds, arguments.seconds)
        SHOWN.print(table_of(setup, arms))
        figures[setup.name] = figures_of(arms)
        if arguments.parts:
            SHOWN.print(part_table(setup, *part_costs(setup, arguments.data)))
    if arguments.sizes:
        table, figures["commit's share"] = measure_sizes()
        SHOWN.print(table)
    SHOWN.print(circumstances())
    rows = [
        (
            name,
            f"{one['plain_step_seconds'] * 1e3:.0f} ms",
            *(f"x {one[key]:.3f}" for key in ("without_monitor", "with_monitor")),
        )
        for name in (setup.name for setup in SETUPS)
        for one in [figures[name]]
    ]
    header = ("what it costs", "plain loop, a step", "Plimsoll's step", "with the monitor")
    title = "What Plimsoll's step and monitor cost"
    file_result(arguments.out, "overhead", title, fenced(printed.text), markdown(header, rows))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
