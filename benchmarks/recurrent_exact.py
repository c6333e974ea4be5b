"""Exact backpropagation through time in little memory: peak and seconds of one step, plain and in segments.

    python benchmarks/recurrent_exact.py [--only growth] [--out table.md]

The model is a character language model (an LSTM of 2 layers with 512 units, 8 samples) on real text: the standard
library's sources. Each measurement is a separate process with one or two steps of SGD. The peak is private memory above
the value before the model was created, from the kernel's high-water mark of the last step. Times are processor seconds
of one thread.

    growth    1,000 to 32,000 steps in segments of the default length: growth of the peak
    pace      1,000 and 2,000 steps, plain and in segments: seconds compared, in turns
    limit     10,000 steps inside a limit (RLIMIT_DATA) in which plain PyTorch runs out of memory, and inside 5 % of
              the plain training's activation memory
    characters  100,000 steps of one sample, inside 1 GiB for the whole process
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _results import add_out, file_result, mib, table

MIB = 1 << 20
HIDDEN, LAYERS, SAMPLES = 512, 2, 8
GROWTH = (1_000, 4_000, 16_000, 32_000)
PACE = (1_000, 2_000)
ROUNDS = 2
LONG, LONGEST = 10_000, 100_000


# -- one training, in a process of its own -----------------------------------------------------------------------------


def characters(number: int) -> list[int]:
    """Return ``number`` characters of the standard library's sources, as numbers below 128."""
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += [code for code in path.read_bytes() if code < 128]
        if len(found) >= number:
            break
    return found[:number]


def train_once(case: dict[str, Any]) -> dict[str, Any]:
    """Perform two steps; return the peak above the memory before the model, and the seconds of the second step."""
    import torch

    from plimsoll.device.base import backend_for
    from plimsoll.models.recurrent.model import build_recurrent
    from plimsoll.records.plan import Choice
    from plimsoll.step.train_step import TrainStep

    torch.manual_seed(0)
    backend = backend_for("cpu")
    samples = case.get("samples", SAMPLES)
    ids = torch.tensor(characters(samples * case["steps"])).view(samples, case["steps"])
    torch.nn.functional.cross_entropy(torch.zeros(1, 2, requires_grad=True), torch.tensor([0])).backward()
    backend.baseline_bytes()
    before_bytes = backend.use().used_bytes
    options = {"steps": case["segment"], **({"kept": case["kept"]} if case.get("kept") else {})}
    choices = [] if case["segment"] is None else [Choice(technique="time_segments", options=options)]
    whole = Choice(technique="micro_batch", options={"samples": samples})
    with ExitStack() as stack:
        if "limit_bytes" in case:
            stack.enter_context(backend.limited(case["limit_bytes"] + case["beyond_baseline"] * before_bytes))
        sizes = {"embedding_size": HIDDEN, "hidden_size": HIDDEN, "num_layers": case.get("layers", LAYERS)}
        model = build_recurrent({"architecture": "lstm", "vocab_size": 128, **sizes})
        step = TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), units="next-tokens", fallbacks=[[*choices, whole]]
        )
        for _ in range(case.get("times", 2)):
            backend.reset_peak()
            started = time.process_time()
            result = step({"input_ids": ids, "labels": ids})
            seconds = time.process_time() - started
        peak_bytes = backend.use().peak_bytes
    return {
        "peak_bytes": peak_bytes - before_bytes, "whole_bytes": peak_bytes, "seconds": seconds, "loss": result.loss,
        "retries": len(result.oom_events), "parameter_bytes": sum(4 * one.numel() for one in model.parameters()),
    }  # fmt: skip


def plain_loop(case: dict[str, Any]) -> dict[str, Any]:
    """Train in the usual loop without Plimsoll, inside the same limit."""
    import torch

    from plimsoll.device.base import backend_for
    from plimsoll.models.recurrent.model import build_recurrent

    backend = backend_for("cpu")
    backend.baseline_bytes()
    before_bytes = backend.use().used_bytes
    ids = torch.tensor(characters(SAMPLES * case["steps"])).view(SAMPLES, case["steps"])
    with backend.limited(case["limit_bytes"] + before_bytes):
        sizes = {"embedding_size": HIDDEN, "hidden_size": HIDDEN, "num_layers": LAYERS}
        model = build_recurrent({"architecture": "lstm", "vocab_size": 128, **sizes})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        except (RuntimeError, MemoryError) as error:
            return {"error": str(error).splitlines()[0]}
    return {"error": ""}


def in_process(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a separate process."""
    done = subprocess.run(
        [sys.executable, __file__, "--do", name, "--case", json.dumps(case)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        return {"error": last}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name} {case}: {found}", file=sys.stderr, flush=True)
    return found


# -- what is measured --------------------------------------------------------------------------------------------------


def growth() -> tuple[list[str], dict[str, Any]]:
    """Measure peaks for several lengths, and fit the exponent of the part that grows."""
    constant_bytes = in_process("train", {"steps": 64, "segment": 8, "times": 1})["peak_bytes"]
    peaks = {steps: in_process("train", {"steps": steps, "segment": 0, "times": 1}) for steps in GROWTH}
    points = [(math.log(steps), math.log(peaks[steps]["peak_bytes"] - constant_bytes)) for steps in GROWTH]
    exponent = slope(points)
    rows = ["| steps | peak MiB | seconds |", "|--:|--:|--:|"]
    rows += [
        f"| {steps:,} | {found['peak_bytes'] / MIB:,.0f} | {found['seconds']:.1f} |" for steps, found in peaks.items()
    ]
    return rows, {"growth_exponent": round(exponent, 3), "constant_mib": constant_bytes // MIB}


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / sum((x - mean_x) ** 2 for x, _ in points)


def pace() -> tuple[list[str], dict[str, Any]]:
    """Measure seconds and peaks of all methods, in turns."""
    ways: dict[str, int | None] = {"plain": None, "default": 0, "256": 256, "32": 32}
    rows = ["| steps | segments of | peak MiB | of plain | seconds | of plain |", "|--:|---|--:|--:|--:|--:|"]
    worst, best, shown = 0.0, 10.0, []
    for steps in PACE:
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, segment in ways.items():
                found[way].append(in_process("train", {"steps": steps, "segment": segment}))
        seconds = {way: min(one["seconds"] for one in ones) for way, ones in found.items()}
        peaks = {way: max(one["peak_bytes"] for one in ones) for way, ones in found.items()}
        for way in ways:
            shares = peaks[way] / peaks["plain"], seconds[way] / seconds["plain"]
            peak = f"{peaks[way] / MIB:,.0f} | {shares[0]:.1%}"
            rows.append(f"| {steps:,} | {way} | {peak} | {seconds[way]:.2f} | {shares[1]:.2f} |")
        ratio = seconds["default"] / seconds["plain"]
        shown.append((f"{steps:,} steps", mib(peaks["plain"]), mib(peaks["default"]), f"x {ratio:.2f}"))
        worst = max(worst, ratio)
        best = min(best, peaks["default"] / peaks["plain"])
    figures = {"worst_time_ratio_of_default": round(worst, 3), "least_memory_ratio": round(best, 4)}
    return rows, {**figures, "shown": shown[-1:]}


def limit() -> tuple[list[str], dict[str, Any]]:
    """Train inside a limit that is too small for plain PyTorch, and inside 5 % of its activation memory."""
    plain = in_process("train", {"steps": LONG, "segment": None})
    activation_bytes = plain["peak_bytes"] - 2 * plain["parameter_bytes"]  # the rest are parameters and gradients
    limits = {"a quarter of plain": (plain["peak_bytes"] // 4, 128)}
    # A second set of gradients exists before it is added to the first; it does not count as activations.
    limits["5 % of plain's activations"] = int(0.05 * activation_bytes) + 3 * plain["parameter_bytes"], 64
    rows = ["| limit beyond the baseline | MiB | plain PyTorch | segments of | peak MiB | seconds | of plain |"]
    rows.append("|---|--:|---|--:|--:|--:|--:|")
    figures: dict[str, Any] = {"plain_mib": plain["peak_bytes"] // MIB, "plain_seconds": round(plain["seconds"], 1)}
    figures["shown"] = []
    for name, (limit_bytes, segment) in limits.items():
        case = {"steps": LONG, "limit_bytes": limit_bytes, "beyond_baseline": 1}
        died = in_process("plain", case)["error"]
        found = in_process("train", {**case, "segment": segment})
        if "error" in found:
            rows.append(f"| {name} | {limit_bytes / MIB:,.0f} | {died[:60]} | {segment} | {found['error'][:80]} | | |")
            continue
        ratio = found["seconds"] / plain["seconds"]
        limited = f"{name} | {limit_bytes / MIB:,.0f} | {died[:60] or 'trains'} | {segment}"
        rows.append(f"| {limited} | {found['peak_bytes'] / MIB:,.0f} | {found['seconds']:.1f} | {ratio:.2f} |")
        row = f"{LONG:,} steps, in a limit of {mib(limit_bytes)} ({name}), segments of {segment}"
        plainly = f"dies; {mib(plain['peak_bytes'])} without" if died else "trains"
        figures["shown"].append((row, plainly, mib(found["peak_bytes"]), f"x {ratio:.2f}"))
        figures[f"time ratio in {name}"] = round(ratio, 3)
        figures[f"loss difference in {name}"] = abs(found["loss"] - plain["loss"])
    return rows, figures


def longest() -> tuple[list[str], dict[str, Any]]:
    """Train 100,000 steps inside 1 GiB."""
    case = {"steps": LONGEST, "samples": 1, "layers": 1, "limit_bytes": 1 << 30, "beyond_baseline": 0, "times": 1}
    found = in_process("train", {**case, "segment": 0})
    if "error" in found:
        return [found["error"]], {"characters": found["error"]}
    rows = ["| steps | limit | whole process MiB | seconds | loss after 1 step |", "|--:|--:|--:|--:|--:|"]
    rows.append(
        f"| {LONGEST:,} | 1 GiB | {found['whole_bytes'] / MIB:,.0f} | {found['seconds']:.1f} | {found['loss']:.3f} |"
    )
    return rows, {"characters_mib": found["whole_bytes"] // MIB}


PARTS = {"growth": growth, "pace": pace, "limit": limit, "characters": longest}


def report(only: str) -> Iterator[tuple[str, dict[str, Any], list[tuple[str, ...]]]]:
    """Yield each part as Markdown, its figures, and its rows for pages."""
    for name, part in PARTS.items():
        if only in name:
            rows, figures = part()
            shown = figures.pop("shown", [])
            yield f"## {name}\n\n" + "\n".join(rows) + "\n", figures, shown


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only parts whose names contain this")
    add_out(parser)
    parser.add_argument("--do", choices=["train", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.do:
        print(json.dumps((train_once if arguments.do == "train" else plain_loop)(arguments.case)))
        return
    text = f"LSTM {LAYERS} x {HIDDEN}, {SAMPLES} samples, characters of the standard library's sources.\n\n"
    figures: dict[str, Any] = {}
    shown: list[tuple[str, ...]] = []
    for part, found, rows in report(arguments.only):
        text, figures, shown = text + part + "\n", figures | found, shown + rows
    print(text)
    header = (f"LSTM {LAYERS} x {HIDDEN}, {SAMPLES} samples, one step", "plain PyTorch", "in segments", "time")
    part = table(header, shown) if shown else ""
    if "characters_mib" in figures:
        part += f"\n\n{LONGEST:,} steps of one sample train in {figures['characters_mib']:,} MiB for the whole process."
    title = "Exact backpropagation through time in segments, CPU"
    file_result(arguments.out, "recurrent-exact", title, text, part, threads=1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
