"""Overhead of `plimsoll watch`: a training with and without a watch, and the processor time of the watch itself.

    python benchmarks/watch_overhead.py                          # about ten minutes
    python benchmarks/watch_overhead.py --rounds 4 --seconds 5

One training process (a torch transformer, one thread, two DataLoader workers) runs rounds of steps that take about
``--seconds``. In each round every arm has a turn, in alternating order: alone, with each kind of watch, and alone once
more, which shows the noise. Measured per turn are the step time by the clock and of the processor, and the processor
time of the watch. The latter runs from its first sample to the end of the turn, without the start of Python (0.5 to 1 s
once). On a busy machine this is the most reliable figure; it is counted in ticks of 10 ms, so turns must be long.

Prints a table, and one JSON object as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

TRAINING = """
import json, sys, time
import torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
model = torch.nn.Sequential(
    torch.nn.Embedding(1000, 128), torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
    torch.nn.Linear(128, 1000),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randint(0, 1000, (1 << 14, 65))
batches = iter([])

def step():
    global batches
    batch = next(batches, None)
    if batch is None:
        batches = iter(DataLoader(data, batch_size=16, num_workers=2, persistent_workers=False))
        batch = next(batches)
    logits = model(batch[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

for line in sys.stdin:
    started, used = time.perf_counter(), time.process_time()
    for _ in range(int(line)):
        step()
    print(json.dumps([time.perf_counter() - started, time.process_time() - used]), flush=True)
"""

ALONE, AGAIN = "alone", "alone, again"
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


def arms(pid: int) -> dict[str, list[str] | None]:
    """Return the options of the watch in each arm, or None for an arm without a watch."""
    process = ["--pid", str(pid)]
    return {
        ALONE: None,
        "a process, every 2 s": process,
        "a process, every 0.5 s": [*process, "--every", "0.5"],
        "this machine, every 2 s": [],
        AGAIN: None,
    }


def used_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_SECONDS


@contextmanager
def watching(options: list[str] | None, record: Path) -> Iterator[int | None]:
    """Run a watch during the block, from its first sample on, and yield its process id."""
    if options is None:
        yield None
        return
    command = [sys.executable, "-m", "plimsoll", "watch", *options, "--record", str(record)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not record.exists() or record.read_bytes().count(b"\n") < 2:
            assert process.poll() is None, "the watch ended before its first sample"
            time.sleep(0.05)
        yield process.pid
        process.send_signal(signal.SIGINT)
    record.unlink()


def turn(training: subprocess.Popen[str], num_steps: int, watch: int | None) -> dict[str, float]:
    """Run ``num_steps``; return wall and processor time of a step, and the processor share of the watch."""
    assert training.stdin is not None
    assert training.stdout is not None
    before, started = used_seconds(watch) if watch else 0.0, time.perf_counter()
    training.stdin.write(f"{num_steps}\n")
    training.stdin.flush()
    wall_seconds, processor_seconds = json.loads(training.stdout.readline())
    share = (used_seconds(watch) - before) / (time.perf_counter() - started) if watch else 0.0
    return {"wall": wall_seconds / num_steps, "processor": processor_seconds / num_steps, "watch": share}


def measured(num_rounds: int, seconds: float) -> tuple[dict[str, list[dict[str, float]]], int]:
    """Return every arm's turns, round by round, and the number of steps in a turn."""
    with (
        tempfile.TemporaryDirectory(prefix="plimsoll-") as folder,
        subprocess.Popen([sys.executable, "-c", TRAINING], stdin=-1, stdout=-1, text=True) as training,
    ):
        turn(training, 5, None)
        num_steps = max(5, round(seconds / turn(training, 10, None)["wall"]))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in arms(training.pid)}
        for number in range(num_rounds):
            order = list(arms(training.pid).items())
            for name, options in order if number % 2 == 0 else order[::-1]:
                with watching(options, Path(folder) / "watch.jsonl") as watch:
                    found[name].append(turn(training, num_steps, watch))
            print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
        assert training.stdin is not None
        training.stdin.close()
    return found, num_steps


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return median ratios to the turn alone in the same round, with quartiles of the wall time's."""
    said = {}
    for name, turns in found.items():
        walls = sorted(one["wall"] / alone["wall"] for one, alone in zip(turns, found[ALONE], strict=True))
        processors = [one["processor"] / alone["processor"] for one, alone in zip(turns, found[ALONE], strict=True)]
        said[name] = {
            "step_seconds": median(one["wall"] for one in turns),
            "wall_ratio": median(walls),
            "wall_ratio_quartiles": (walls[len(walls) // 4], walls[-1 - len(walls) // 4]),
            "processor_ratio": median(processors),
            "watch_share": median(one["watch"] for one in turns),
        }
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0, help="approximate seconds of a turn")
    args = parser.parse_args()
    found, num_steps = measured(args.rounds, args.seconds)
    said = summary(found)
    title = f"{args.rounds} rounds, turns of {num_steps} steps; ratios to the turn alone of the same round, medians"
    table = Table("watch", "ms per step", "clock", "quartiles", "processor", "the watch itself", title=title)
    for name, one in said.items():
        low, high = one["wall_ratio_quartiles"]
        table.add_row(
            name,
            f"{1000 * one['step_seconds']:.1f}",
            f"{one['wall_ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{one['processor_ratio']:.3f}",
            f"{one['watch_share']:.2%}" if name not in {ALONE, AGAIN} else "",
        )
    Console(width=110).print(table)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
