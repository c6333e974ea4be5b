"""An embedding table larger than memory: memory and speed of its training, and a comparison with a table in memory.

    PYTHONPATH=src python benchmarks/embeddings_host.py [--quick] [--folder /disk] [--only limit,loss,speed]

The ids follow Zipf's law. Rows are ordered by frequency, as in vocabularies, or ``scattered``. ``limit`` trains a
memory-mapped table inside a limit on private memory (in a separate process, with `TrainStep`, reading rows one batch
ahead). ``loss`` and ``speed`` compare it with ``nn.Embedding(sparse=True)`` in memory under the same optimizer of
``torch.optim``, in plain loops.

In ``speed``, the variants take turns and do little work besides the table, so ratios for real models are closer to 1. A
mapped table begins cold: the first steps wait for the disk. The folder must be on a disk with space for four tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _embeddings_process import KINDS, LR, loss_of, small, zipf_batches
from _results import add_out, fenced, file_result, keep_printed
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.host_optimizer import optimizer_of

PROCESS = Path(__file__).with_name("_embeddings_process.py")
SECTIONS = ("limit", "loss", "speed")
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the large table")
    parser.add_argument(
        "--small-rows", type=int, default=1_000_000, help="rows of the table that all variants keep in memory"
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ids", type=int, default=4096, help="ids per batch")
    parser.add_argument("--limit", type=int, default=512, help="MiB of private memory")
    parser.add_argument("--steps", type=int, default=300, help="steps inside the limit and for the losses")
    parser.add_argument("--rounds", type=int, default=60, help="rounds, of 20 steps of each variant")
    parser.add_argument("--order", choices=("frequency", "scattered"), default="frequency", help="order of the rows")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder for the tables")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="tables of 200,000 rows and few steps, to try the script")
    add_out(parser)
    options = parser.parse_args()
    printed = keep_printed()
    if options.quick:
        options.rows, options.small_rows, options.steps, options.rounds = 200_000, 50_000, 30, 3
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    sections = options.only.split(",")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if "limit" in sections:
            results["limit"] = {kind: inside_a_limit(kind, options, folder) for kind in KINDS}
        if "loss" in sections:
            results["loss"] = {kind: loss_difference(kind, options, Path(folder)) for kind in KINDS}
        if "speed" in sections:
            results["speed"] = [
                speeds(kind, num_rows, options, Path(folder))
                for num_rows in (options.small_rows, options.rows)
                for kind in KINDS
            ]
    part = ""
    if "limit" in results:
        found = max(results["limit"].values(), key=lambda one: one["peak_bytes"])
        size = f"{options.rows:,} x {options.width} ({found['table_bytes'] / 2**30:.1f} GiB)"
        part = (
            f"A table of {size} trains inside a limit of {options.limit} MiB, in {found['peak_bytes'] / MIB:.0f} MiB."
        )
    if "loss" in results:
        largest = max(value for one in results["loss"].values() for value in one.values())
        part += f" Largest difference of a loss or a weight from `nn.Embedding(sparse=True)` in memory: {largest:g}."
    file_result(options.out, "embeddings-host", "A table larger than the memory", fenced(printed.text), part)
    print(json.dumps(results))


def inside_a_limit(kind: str, options: argparse.Namespace, folder: str) -> dict[str, float]:
    numbers = (options.rows, options.width, options.limit, options.ids, options.steps, options.order)
    command = [sys.executable, str(PROCESS), kind, *map(str, numbers), folder]
    result: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    (Path(folder) / "table").unlink()
    print(
        f"{kind:10} {options.rows:,} x {options.width} ({result['table_bytes'] / MIB:,.0f} MiB) in a limit of "
        f"{options.limit} MiB: peak {result['peak_bytes'] / MIB:.0f} MiB, {result['steps_per_second']:.0f} steps/s "
        f"(median {result['median_steps_per_second']:.0f}), made in {result['made_seconds']:.1f} s, loss "
        f"{result['first_loss']:.4f} -> {result['last_loss']:.4f}",
        flush=True,
    )
    return result


Variant = tuple[nn.Module, torch.optim.Optimizer]


def variants_of(kind: str, num_rows: int, width: int, names: list[str], folder: Path) -> dict[str, Variant]:
    """Return tables with the same values; their files are already unlinked."""
    made: dict[str, Callable[[], nn.Module]] = {
        "nn.Embedding": lambda: nn.Embedding(num_rows, width, sparse=True, _weight=torch.empty(num_rows, width)),
        "in memory": lambda: HostEmbedding(num_rows, width),
        "mapped": lambda: HostEmbedding(num_rows, width, path=folder / "table", initialize=lambda block: None),
    }
    found = {}
    for name in names:
        table = made[name]()
        torch.manual_seed(0)
        with torch.no_grad():
            small(table.weight)
        is_plain = name == "nn.Embedding"
        optimizer = KINDS[kind](table.parameters(), lr=LR) if is_plain else optimizer_of(table, KINDS[kind], lr=LR)
        found[name] = table, optimizer
    (folder / "table").unlink(missing_ok=True)
    return found


def train(variant: Variant, batches: list[torch.Tensor]) -> list[float]:
    table, optimizer = variant
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        loss = loss_of(table, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loss_difference(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    names = ["nn.Embedding", "in memory", "mapped"]
    variants = variants_of(kind, options.small_rows, options.width, names, folder)
    batches = zipf_batches(options.small_rows, options.ids, options.steps, options.order)
    losses = {name: train(variant, batches) for name, variant in variants.items()}
    expected, weight = losses.pop("nn.Embedding"), variants["nn.Embedding"][0].weight.detach()
    result = {}
    for name, found in losses.items():
        result[f"{name}, loss"] = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        result[f"{name}, weights"] = (variants[name][0].weight.detach() - weight).abs().max().item()
    listed = ", ".join(f"{name} {difference:g}" for name, difference in result.items())
    print(f"{kind:10} largest difference from nn.Embedding after {options.steps} steps: {listed}", flush=True)
    return result


def speeds(kind: str, num_rows: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return steps per second of the median round, and the median ratios over all rounds and over the last third."""
    names = ["nn.Embedding", "in memory", "mapped"]
    if num_rows > options.small_rows:
        names.remove("in memory")  # a machine of 24 GB holds only two tables with their states
    variants = variants_of(kind, num_rows, options.width, names, folder)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        batches = zipf_batches(num_rows, options.ids, 20, options.order, seed=number)
        for name, variant in variants.items():
            started = time.perf_counter()
            train(variant, batches)
            rounds[name].append(20 / (time.perf_counter() - started))
    result: dict[str, Any] = {"optimizer": kind, "rows": num_rows}
    for name in names:
        some = rounds[name][1:]
        ratios = [one / other for one, other in zip(some, rounds["nn.Embedding"][1:], strict=True)]
        all_rounds, last = statistics.median(ratios), statistics.median(ratios[-max(len(ratios) // 3, 1) :])
        result[name] = {"steps_per_second": statistics.median(some), "ratio": all_rounds, "last_ratio": last}
        print(
            f"{kind:10} {num_rows:12,} rows {name:14} {statistics.median(some):7.0f} steps/s {all_rounds:6.2f}x, "
            f"{last:.2f}x in the last third",
            flush=True,
        )
    return result


if __name__ == "__main__":
    main()
