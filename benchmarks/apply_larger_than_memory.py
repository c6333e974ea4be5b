"""Scoring texts with a model under a private limit of half its weights' size, against a run without a limit.

    PYTHONPATH=src python benchmarks/apply_larger_than_memory.py --texts agnews-test.csv --folder CACHE
        [--num-texts 2000] [--length 128] [--limit 1.2GiB] [--layers 24] [--hidden 2048] [--with-accelerate]

Each arm runs in a separate process with the same passes:

- *unlimited*: all weights in private memory;
- *limited*: weights placed by `plan_inference`, inside the limit;
- *limited, dropped*: the same, but streamed weights are dropped from the page cache, so that every pass reads the disk;
- with ``--with-accelerate``: a few passes of accelerate's `disk_offload`, which needs another copy of the weights.

A cold sequential read of the checkpoint is measured for comparison. Weights are random, so ids are hashes of words.
Bytes read are ``read_bytes`` of /proc/self/io, that is, from the disk. Peaks are the kernel's high-water mark of
private memory.

Not covered: a control group that limits the page cache.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _large_model import add_options, large_model
from _results import INSIDE_A_LIMIT, add_out, file_result, keep_printed, mib, table
from plimsoll.device.base import backend_for
from plimsoll.device.cpu.pages import cold_bytes_per_second
from plimsoll.inference.placement import placed_model
from plimsoll.models.inference import inference_task
from plimsoll.models.loading import load_model
from plimsoll.planning.plan_inference import plan_inference
from plimsoll.records.placement import InferencePlan
from plimsoll.records.units import format_bytes, parse_bytes

MIB = 1 << 20
FEW_PASSES = 12  # passes of accelerate and of the arm that reads the disk


def token_rows(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Return the texts as ids, in order; a text is the last field of a line."""
    with Path(options.texts).open(encoding="utf-8", newline="") as file:
        texts = [row[-1] for row in csv.reader(file)][: options.num_texts]
    return [
        [zlib.crc32(word.encode()) % vocab_size for word in text.split()[: options.length]] or [0] for text in texts
    ]


def passes(rows: list[list[int]], most_tokens: int) -> Iterator[list[int]]:
    """Yield the row numbers of each pass, long rows first, with at most ``most_tokens`` cells."""
    waiting = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    while waiting:
        taken = waiting[: max(1, most_tokens // len(rows[waiting[0]]))]
        waiting = waiting[len(taken) :]
        yield taken


def batch_of(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return the rows as a batch, padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def _model(mode: str, folder: Path, plan: InferencePlan) -> Iterator[nn.Module]:
    if mode == "unlimited":
        yield load_model(folder, head="language-modeling").model
    elif mode == "accelerate":
        from accelerate import disk_offload

        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            model = load_model(folder, head="language-modeling", place="mapped").model
            yield disk_offload(model, scratch, execution_device=torch.device("cpu"))
    else:
        streamed_bytes = sum(part.num_bytes for part in plan.parts if part.is_streamed)
        dropped = {"cached_bytes": 0, "read_bytes": streamed_bytes}
        with placed_model(folder, plan.model_copy(update=dropped) if mode == "dropped" else plan) as model:
            yield model


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Score the texts in this process, in the way that the options name."""
    folder, plan = Path(options.folder), InferencePlan.load(Path(options.plan))
    task, backend = inference_task("score", folder), backend_for("cpu")
    rows = token_rows(options, json.loads((folder / "config.json").read_text())["vocab_size"])
    cut = list(passes(rows, plan.micro_batch * plan.longest_tokens))
    cut = cut[:FEW_PASSES] if options.worker in ("accelerate", "dropped") else cut
    backend.baseline_bytes()
    backend.reset_peak()
    found: dict[int, float] = {}
    with ExitStack() as stack:
        if options.worker in ("limited", "dropped"):
            stack.enter_context(backend.limited(plan.budget_bytes or 0))
        started = time.perf_counter()
        model = stack.enter_context(_model(options.worker, folder, plan))
        stack.enter_context(torch.inference_mode())
        load_seconds, read_before = time.perf_counter() - started, _read_bytes()
        started = time.perf_counter()
        for numbers in cut:
            sums, _ = task.compute(model, batch_of([rows[number] for number in numbers]))
            found |= dict(zip(numbers, sums.tolist(), strict=True))
        seconds = time.perf_counter() - started
        return {
            "peak_bytes": backend.use().peak_bytes, "load_seconds": load_seconds, "seconds": seconds,
            "num_texts": len(found), "texts_per_second": len(found) / seconds, "num_passes": len(cut),
            "read_bytes_per_second": (_read_bytes() - read_before) / seconds, "sums": found,
        }  # fmt: skip


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def _started(mode: str, folder: Path, plan: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", mode, "--folder", str(folder), "--plan", str(plan)]
    command += ["--texts", options.texts, "--num-texts", str(options.num_texts), "--length", str(options.length)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{mode} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Plan, run each arm, and compare the results."""
    folder = large_model(Path(options.folder), options)
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    limit_bytes = parse_bytes(options.limit) if options.limit else num_bytes // 2
    plan = plan_inference(folder, "score", longest_tokens=options.length, limit_bytes=limit_bytes, device="cpu")
    if not plan.fits:
        sys.exit(f"{format_bytes(limit_bytes)} are not enough: give --limit {format_bytes(plan.smallest_budget_bytes)}")
    place = folder.parent / f"plan-{os.getpid()}.json"
    plan.save(place)
    modes = ["unlimited", "limited", "dropped", *(["accelerate"] if options.with_accelerate else [])]
    try:
        runs = {mode: _started(mode, folder, place, options) for mode in modes}
    finally:
        place.unlink()
    expected = runs["unlimited"]["sums"]
    for run in runs.values():
        sums = run.pop("sums")
        run["max_relative_difference"] = max(
            abs(value - expected[number]) / max(abs(expected[number]), 1.0) for number, value in sums.items()
        )
    return {
        "weights_bytes": num_bytes, "limit_bytes": limit_bytes, "rows_per_pass": plan.micro_batch,
        "resident_bytes": plan.resident_bytes, "predicted_peak_bytes": plan.peak.likely_bytes,
        "predicted_high_bytes": plan.peak.high_bytes, "predicted_rows_per_second": plan.rows_per_second,
        "plan_seconds": plan.plan_seconds, "disk_bytes_per_second": cold_bytes_per_second(files), "runs": runs,
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"{format_bytes(found['weights_bytes'])} of weights, limit {format_bytes(found['limit_bytes'])}, "
        f"{format_bytes(found['resident_bytes'])} resident, {found['rows_per_pass']} rows a pass; predicted peak "
        f"{format_bytes(found['predicted_peak_bytes'])}, {found['predicted_rows_per_second']:.2f} rows/s; the disk "
        f"reads {found['disk_bytes_per_second'] / MIB:,.0f} MiB/s\n"
    )
    print("| | peak MiB | texts/s | from the disk MiB/s | load s | largest relative difference |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for mode, run in found["runs"].items():
        print(
            f"| {mode} | {run['peak_bytes'] / MIB:,.0f} | {run['texts_per_second']:.2f} | "
            f"{run['read_bytes_per_second'] / MIB:,.0f} | {run['load_seconds']:.1f} | "
            f"{run['max_relative_difference']:.2g} |"
        )


def part_of(found: dict[str, Any]) -> str:
    """Return the part that pages show."""
    runs = found["runs"]
    difference = max(run["max_relative_difference"] for run in runs.values())
    name = (
        f"a model with {format_bytes(found['weights_bytes'])} of weights scores {runs['limited']['num_texts']:,} "
        f"texts; largest relative difference of a result: {difference:.2g}"
    )
    sizes = (
        found["limit_bytes"],
        runs["limited"]["peak_bytes"],
        found["predicted_peak_bytes"],
        runs["unlimited"]["peak_bytes"],
    )
    speed = runs["dropped"]["read_bytes_per_second"]
    return (
        f"{table(INSIDE_A_LIMIT, [[name, *map(mib, sizes)]])}\n\nWhere every pass of it has to read the weights from "
        f"the disk, it reads {mib(speed)}/s of the {mib(found['disk_bytes_per_second'])}/s that the disk has."
    )


def main() -> None:
    """Run the comparison, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", required=True, help="a csv file without a header, the text in its last column")
    parser.add_argument("--folder", required=True, help="folder for the model, on a disk")
    parser.add_argument("--num-texts", type=int, default=2000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--limit", help="limit on private memory (default: half the weights' size)")
    parser.add_argument("--with-accelerate", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    add_options(parser)
    add_out(parser)
    options = parser.parse_args()
    printed = keep_printed()
    found = work(options) if options.worker else compare(options)
    if not options.worker:
        show(found)
        title, text = "A model scores texts in half the size of its weights", f"{printed.text.strip()}"
        file_result(options.out, "apply-larger-than-memory", title, text, part_of(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
