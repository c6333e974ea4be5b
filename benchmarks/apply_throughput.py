"""Rows per second of `plimsoll apply` and of ``transformers.pipeline``, in one process, over the same texts.

Both load the same model in float32 and write only their results. The pipeline gets the texts from a generator and is
run with each of the given batch sizes; the fastest counts. Arms take turns; the result is the median of their ratios.

The benchmark also measures how much batching changes results, in float32 and bfloat16: each row alone against the
passes of `plimsoll apply`.

    python benchmarks/apply_throughput.py --model MODEL --data agnews-test.csv --column 3 --rows 2000
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from plimsoll.data.formats import Reading
from plimsoll.data.input_rows import open_rows
from plimsoll.inference.apply import ApplyOptions, apply_model
from plimsoll.inference.model import Dtype

TASKS = {"classify": "text-classification", "embed": "feature-extraction"}


def main() -> None:
    options = parsed()
    texts = [
        row.text
        for row in islice(open_rows(options.data, Reading(text=options.column, header=False)).rows(), options.rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "x.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        figures = throughput(options, texts, data) | rounding(options, texts, Path(folder))
    print(json.dumps(figures))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--column", default="3")
    parser.add_argument("--task", choices=sorted(TASKS), default="embed")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    return parser.parse_args()


def throughput(options: argparse.Namespace, texts: list[str], data: Path) -> dict[str, Any]:
    """Time both arms in turns."""
    from transformers import pipeline

    # `plimsoll apply` truncates too; without truncation the pipeline fails on texts that are too long.
    theirs = pipeline(TASKS[options.task], model=str(options.model), device="cpu", truncation=True)
    ours_rates: list[float] = []
    their_rates: dict[int, list[float]] = {size: [] for size in options.batch_sizes}
    padding_share = 0.0
    for _ in range(options.turns):
        facts = apply_model(options.model, data, data.with_name("y.jsonl"), ApplyOptions(task=options.task), force=True)
        padding_share = 1 - facts.num_new_tokens / facts.num_padded_tokens
        ours_rates.append(facts.num_rows / facts.seconds)
        for size, rates in their_rates.items():
            began = time.perf_counter()
            for _result in theirs(one_by_one(texts), batch_size=size):
                pass
            rates.append(len(texts) / (time.perf_counter() - began))
    print(f"{'':28}{'rows/s':>10}{'ratio':>8}")
    print(f"{'plimsoll apply':28}{statistics.median(ours_rates):>10.1f}{1:>8.2f}   padding {padding_share:.1%}")
    ratios = {}
    for size, rates in their_rates.items():
        ratios[size] = statistics.median(ours / rate for ours, rate in zip(ours_rates, rates, strict=True))
        print(f"{f'pipeline, batch_size={size}':28}{statistics.median(rates):>10.1f}{1 / ratios[size]:>8.2f}")
    return {
        "rows_per_second": statistics.median(ours_rates),
        "padding_share": padding_share,
        "times_faster_than_the_fastest_pipeline": min(ratios.values()),
        "times_faster_than_pipeline": ratios,
    }


def one_by_one(texts: list[str]) -> Iterator[str]:
    """Yield the texts: the pipeline batches a generator, but processes a list one by one."""
    yield from texts


def rounding(options: argparse.Namespace, texts: list[str], folder: Path) -> dict[str, Any]:
    """Measure the largest difference between results in a batch and results of single rows."""
    data = folder / "few.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:256]))
    found = {}
    names: tuple[Dtype, ...] = ("fp32", "bf16")
    for dtype in names:
        together = numbers(options, data, ApplyOptions(task=options.task, dtype=dtype))
        alone = numbers(options, data, ApplyOptions(task=options.task, dtype=dtype, rows_per_pass=1))
        found[f"most_rounding_{dtype}"] = (together - alone).abs().max().item()
        print(f"{dtype}: results differ by up to {found[f'most_rounding_{dtype}']:.2g} from results of single rows")
    return found


def numbers(options: argparse.Namespace, data: Path, how: ApplyOptions) -> torch.Tensor:
    out = data.with_name("numbers.jsonl")
    apply_model(options.model, data, out, how, force=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return torch.tensor(
        [row["embedding"] if options.task == "embed" else list(row["probabilities"].values()) for row in rows]
    )


if __name__ == "__main__":
    main()
