"""One long text in a batch of short ones: the effect of splitting by length on recurrent nets inside a budget.

    python benchmarks/recurrent_by_length.py --data agnews-test.csv    # label, title, body; no header, as AG News has
    python benchmarks/recurrent_by_length.py                           # random lengths from 20 to 90 words

A batch has ``--batch`` texts: one of ``--long`` words, the others with the lengths of news (in words). Three models
take two steps on it from the same weights: a GRU classifier and a BiLSTM tagger, which pack their texts, and an LSTM
language model, which does not. The variants are the batch in its order, padded to the longest text; ``by_length``; and
additionally ``time_segments`` or ``packed_stretches``. The last two avoid torch's slow handling of packed batches on
the CPU, whose time grows with the square of the length.

Each variant begins with the whole batch and halves the micro-batch until it fits. Times are processor seconds of the
second step, on one thread. Prints a table, and one JSON object as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from _results import add_out, fenced, file_result, keep_printed
from _results import table as markdown

WORDS, LABELS = 4000, 4
MODELS = {
    "GRU classifier": ({"architecture": "gru", "num_labels": LABELS}, "samples"),
    "BiLSTM tagger": (
        {"architecture": "lstm", "bidirectional": True, "is_tagger": True, "num_labels": LABELS},
        "tokens",
    ),
    "LSTM language model": ({"architecture": "lstm"}, "next-tokens"),
}
CUTS: dict[str, tuple[tuple[str, dict[str, int]], ...]] = {
    "as it comes": (),
    "by_length": (("by_length", {}),),
    "by_length, time_segments": (("by_length", {}), ("time_segments", {"steps": 0})),
    "by_length, packed_stretches": (("by_length", {}), ("packed_stretches", {})),
}


def lengths_of(data: Path | None, num_texts: int) -> list[int]:
    drawn = random.Random(0)
    if data is None:
        return [drawn.randint(20, 90) for _ in range(num_texts)]
    with data.open(newline="", encoding="utf-8") as file:
        found = [len(" ".join(row[1:]).split()) for row in csv.reader(file)]
    return drawn.sample(found, num_texts)


def measure(name: str, cut: str, lengths: list[int], budget_mib: int) -> dict[str, Any]:
    """Train in this process, within its baseline plus ``budget_mib``."""
    import torch

    from plimsoll.device.base import backend_for
    from plimsoll.models.recurrent.model import build_recurrent
    from plimsoll.records.plan import Choice, micro_batch_choice
    from plimsoll.step.micro_batches import shape_of, weighted_micro_batches
    from plimsoll.step.train_step import TrainStep

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fields, units = MODELS[name]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, WORDS, mask.shape) * mask
    if units == "samples":
        labels = torch.arange(len(lengths)) % LABELS
    else:
        labels = (ids % LABELS if units == "tokens" else ids).masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    model = build_recurrent(fields | {"vocab_size": WORDS, "embedding_size": 128, "hidden_size": 128}).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    choices = [Choice(technique=technique, options=options) for technique, options in CUTS[cut]]
    sizes = [max(len(lengths) >> shift, 1) for shift in range(len(lengths).bit_length())]
    step = TrainStep(
        model, optimizer, units=units, fallbacks=[[micro_batch_choice(size), *choices] for size in dict.fromkeys(sizes)]
    )
    backend = backend_for("cpu")
    before_bytes = backend.use().used_bytes
    with backend.limited(before_bytes + (budget_mib << 20)):
        ooms = len(step(batch).oom_events)
        backend.reset_peak()
        started = time.process_time()
        result = step(batch)
        seconds = time.process_time() - started
        peak_bytes = backend.use().peak_bytes - before_bytes
    micro_batches = [
        one.batch
        for one in weighted_micro_batches(batch, result.micro_batch, shape_of(batch, step.workload), step.workload)
    ]
    return {
        "micro_batch": result.micro_batch,
        "ooms": ooms + len(result.oom_events),
        "passes": len(micro_batches),
        "most_samples": max(len(one["input_ids"]) for one in micro_batches),
        "positions": sum(one["input_ids"].numel() for one in micro_batches),
        "cpu_seconds": seconds,
        "peak_bytes": peak_bytes,
        "loss": result.loss,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="csv file without a header: label, title, body")
    parser.add_argument("--batch", type=int, default=64, help="texts of a batch, including the long one")
    parser.add_argument("--long", type=int, default=4000, help="words of the long text")
    parser.add_argument(
        "--budget", type=int, nargs=3, default=[128, 384, 512], help="MiB above the process's baseline, for each model"
    )
    add_out(parser)
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = lengths_of(args.data, args.batch - 1)
    lengths.insert(args.batch // 2, args.long)
    if args.arm:
        print(json.dumps(measure(args.arm[0], args.arm[1], lengths, int(args.arm[2]))))
        return
    columns = ("model", "cut", "micro-batch", "passes", "texts in one", "positions", "CPU s a step", "peak", "loss")
    table = Table(
        *columns,
        title=f"{args.batch - 1} texts of {min(lengths)} to {sorted(lengths)[-2]} words and one of {args.long:,}",
    )
    found: dict[str, Any] = {}
    for (name, budget_mib), cut in ((one, cut) for one in zip(MODELS, args.budget, strict=True) for cut in CUTS):
        command = [sys.executable, *sys.argv, "--arm", name, cut, str(budget_mib)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        one = found[f"{name}, {cut}"] = json.loads(done.stdout.splitlines()[-1])
        peak = f"{one['peak_bytes'] / 2**20:.0f} of {budget_mib} MiB"
        counts = (f"{one[key]:,}" for key in ("micro_batch", "passes", "most_samples", "positions"))
        table.add_row(name, cut, *counts, f"{one['cpu_seconds']:.2f}", peak, f"{one['loss']:.5f}")
    printed = keep_printed()
    Console(width=160).print(table)
    rows = []
    for name in MODELS:
        ways = {cut: found[f"{name}, {cut}"]["cpu_seconds"] for cut in CUTS}
        fastest = min(ways, key=ways.__getitem__)
        rows.append([name, f"{ways['as it comes']:.1f} s", f"{ways[fastest]:.1f} s", f"`{fastest}`"])
    header = (f"a step of {str(table.title).replace('words', 'words,', 1)}", "as it comes", "fastest", "with")
    title, part = "One long text in a batch of short ones", markdown(header, rows)
    file_result(args.out, "recurrent-by-length", title, fenced(printed.text), part, threads=1, packages=("torch",))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
