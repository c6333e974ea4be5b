"""Measure the wall time of commands, from the prompt to the answer, in units of importing torch and transformers.

    python benchmarks/latency.py [--rounds 3] [--only TEXT] [--out FOLDER]

One R is the time of `import torch, transformers; from transformers import GPT2LMHeadModel` in a new process: the mean
of one before and one after the rows of a round. A row is measured with an empty cache folder; the rows "again" use the
cache that it has filled. Each row has a budget in R, and the exit code is 1 if the median of the rounds exceeds one.
The jobs are the one of docs/benchmarks.md, and GPT-2 124M with 64 x 512 tokens in bfloat16, on the sources of Python's
library. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from _results import add_out, file_result, table

IMPORTS = "import torch, transformers; from transformers import GPT2LMHeadModel"
TEXT_BYTES = 2_000_000
BENCHMARK_JOB = {
    "model": {"architecture": "gpt2", "n_layer": 6, "n_embd": 256, "n_head": 4},
    "task": "language-modeling",
    "data": {"train": "corpus/*.txt", "validation": 0.02},
    "tokenizer": {"train": "bpe", "vocab_size": 8000},
    "sequence_length": 256,
    "batch_size": 64,
    "optimizer": {"name": "adamw", "lr": 3.0e-4, "clip_norm": 1.0},
    "steps": 200,
    "precision": "fp32",
    "checkpoint": {"every": 50, "keep": 2},
}
GPT2_JOB = BENCHMARK_JOB | {
    "model": {"architecture": "gpt2"},
    "tokenizer": {"train": "bpe", "vocab_size": 50257},
    "sequence_length": 512,
    "precision": "bf16",
}
# Its steps are short, so that mainly the time before the first step is measured.
SHORT_STEPS_JOB = BENCHMARK_JOB | {"batch_size": 2, "steps": 3}
FAULTS = ("model.architecture=gtp2", "optimizer.l=3", "data.train=nowhere/*.txt")


@dataclass(frozen=True)
class Row:
    """A command, the event that must happen within the budget, and the expected exit codes."""

    name: str
    budget: float  # in R
    arguments: tuple[str, ...]
    exit_codes: tuple[int, ...] = (0,)
    again: float | None = None  # the budget when the command is repeated with a filled cache folder
    until_first_step: bool = False


ROWS = (
    Row("`--help`", 0.06, ("--help",)),
    Row("`predict`, GPT-2 6 x 256, RTX 3060", 1.0, ("predict", "benchmark.yaml", "--device", "rtx3060"), (0, 1), 0.6),
    Row("`predict`, GPT-2 6 x 256, CPU", 1.1, ("predict", "benchmark.yaml"), (0, 1), 0.6),
    Row("`predict`, GPT-2 124M, RTX 3060", 1.5, ("predict", "gpt2.yaml", "--device", "rtx3060"), (0, 1)),
    Row("`plan`, GPT-2 6 x 256, 1 GiB", 2.0, ("plan", "benchmark.yaml", "--budget", "1GiB"), (0,), 1.0),
    Row("`plan`, GPT-2 6 x 256, 500 MiB", 3.0, ("plan", "benchmark.yaml", "--budget", "500MiB"), (0,)),
    Row("`plan`, GPT-2 124M, H100, 4 GiB", 5.0, ("plan", "gpt2.yaml", "--device", "h100", "--budget", "4GiB"), (0,)),
    Row("`predict`, 100 MiB, refused", 1.0, ("predict", "benchmark.yaml", "--budget", "100MiB"), (1, 2)),
    Row("`plan`, 100 MiB, refused", 1.0, ("plan", "benchmark.yaml", "--budget", "100MiB"), (1, 2)),
    *(Row(f"`predict --set {fault}`", 0.3, ("predict", "benchmark.yaml", "--set", fault), (2,)) for fault in FAULTS),
    Row(
        "`train --plan`, to its first step", 2.0,
        ("train", "short.yaml", "--plan", "short.json", "--cache", "tokens", "--out", "run", "--force"),
        until_first_step=True,
    ),
)  # fmt: skip


class Place:
    """A folder with the jobs, their text, a plan, and the cache folder of the commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache = folder / "cache"
        self._environment = os.environ | {"PLIMSOLL_CACHE": str(self._cache)}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is already compiled
        (folder / "corpus").mkdir()
        self._write_text(folder / "corpus" / "library.txt")
        for name, job in (("benchmark", BENCHMARK_JOB), ("gpt2", GPT2_JOB), ("short", SHORT_STEPS_JOB)):
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")

    @staticmethod
    def _write_text(path: Path) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
        path.write_text(text[:TEXT_BYTES], encoding="utf-8")

    def prepare(self) -> None:
        """Tokenize, and make the plan for `train --plan`; neither is measured."""
        for arguments in (
            ("data", "tokenize", "short.yaml", "--cache", "tokens"),
            ("plan", "short.yaml", "--budget", "1GiB", "-o", "short.json"),
        ):
            self.run(arguments, (0,))
        self.forget()

    def forget(self) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)

    def import_seconds(self) -> tuple[float, float]:
        return self._timed(partial(self._finish, [sys.executable, "-c", IMPORTS], (0,)))

    def run(self, arguments: tuple[str, ...], exit_codes: tuple[int, ...]) -> tuple[float, float]:
        """Run a command to its end; return seconds of the clock and of the processor."""
        return self._timed(partial(self._finish, self._command(arguments), exit_codes))

    def run_to_first_step(self, arguments: tuple[str, ...]) -> tuple[float, float]:
        """Run a training until its first step is written; the rest is not measured."""
        metrics = self._folder / "run" / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        started = time.perf_counter()
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        command, where = self._command(arguments), {"cwd": self._folder, "env": self._environment}
        process = subprocess.Popen(command, stdout=nothing, stderr=pipe, **where)
        while not self._has_step(metrics):
            if process.poll() is not None:
                sys.exit(f"plimsoll {' '.join(arguments)} ended before its first step: {process.communicate()[1]!r}")
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        process.communicate()
        return seconds, float("nan")

    @staticmethod
    def _has_step(metrics: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return '"event":"step"' in metrics.read_text(encoding="utf-8")
        return False

    @staticmethod
    def _timed(run: Callable[[], None]) -> tuple[float, float]:
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        run()
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        return [str(Path(sys.executable).with_name("plimsoll")), *arguments]

    def _finish(self, command: list[str], exit_codes: tuple[int, ...]) -> None:
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False, timeout=900
        )
        if done.returncode not in exit_codes:
            sys.exit(f"{' '.join(command[1:])} ended with {done.returncode}:\n{done.stderr}")


def one_round(place: Place, rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Measure R twice and each row once, in seconds of the clock and of the processor."""
    found = {"R": place.import_seconds()}
    for row in rows:
        place.forget()
        measured = place.run_to_first_step if row.until_first_step else partial(place.run, exit_codes=row.exit_codes)
        found[row.name] = measured(row.arguments)
        if row.again is not None:
            found[f"{row.name}, again"] = measured(row.arguments)
    before, after = found["R"], place.import_seconds()
    found["R"] = (before[0] + after[0]) / 2, (before[1] + after[1]) / 2
    for name, (seconds, processor_seconds) in found.items():
        print(f"{seconds:7.2f} s, processor {processor_seconds:7.2f} s: {name}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    add_out(parser)
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.only in row.name]
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        if any(row.until_first_step for row in rows):
            place.prepare()
        rounds = [one_round(place, rows) for _ in range(arguments.rounds)]
    budgets = {row.name: row.budget for row in rows}
    budgets |= {f"{row.name}, again": row.again for row in rows if row.again is not None}
    ratios = {name: statistics.median(found[name][0] / found["R"][0] for found in rounds) for name in rounds[0]}
    medians = {name: statistics.median(found[name][0] for found in rounds) for name in rounds[0]}
    over = [name for name, budget in budgets.items() if ratios[name] > budget]
    shown = [
        (name, f"{medians[name]:.1f} s", f"{ratios[name]:.2f}", f"{budgets[name]:g}", "over" if name in over else "")
        for name in medians
        if name != "R"
    ]
    about = f"R, importing torch and transformers, took {medians['R']:.1f} s; medians of {arguments.rounds} rounds."
    text = f"{about}\n\n{table(('command', 'wall time', 'in R', 'budget', ''), shown)}"
    print(text)
    file_result(arguments.out, "latency", "Wall time of commands", "", text)
    print(json.dumps({"ratios": ratios, "seconds": medians, "over": over}))
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
