"""Private memory of each of two ranks for each method of sharding a model, in fp32 and in bf16.

    python benchmarks/shards_memory.py [--out table.md]

A GPT-2 of 12 blocks trains for a few steps in two CPU processes over gloo: plain data-parallel, `fully_shard` gathered
once and twice, in bf16 if the job computes in it, and offloaded (``offload=disk``). The measured value is the higher
private memory of both ranks without mapped files, as in `ranks_prediction`; live tensors are from the dry run. Not
covered: seconds, GPUs, several machines.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from _results import add_out, file_result
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Value
from predict_cpu_rss import MIB
from ranks_prediction import DEEP, Shared, measured_bytes, predicted_bytes

NUM_RANKS = 2
ONCE: dict[str, Value] = {"gathered": "once"}
TWICE: dict[str, Value] = {"gathered": "twice"}
WAYS: tuple[tuple[str, dict[str, Value] | None], ...] = (
    ("fp32", None),
    ("fp32", ONCE),
    ("fp32", TWICE),
    ("fp32", TWICE | {"offload": "disk"}),
    ("bf16", None),
    ("bf16", ONCE),
    ("bf16", TWICE),
    ("bf16", ONCE | {"dtype": "bf16"}),
    ("bf16", TWICE | {"dtype": "bf16"}),
    ("bf16", TWICE | {"dtype": "bf16", "offload": "disk"}),
)


@dataclass(frozen=True)
class InPrecision(Shared):
    """A case with several ranks and a precision."""

    precision: str = "fp32"

    def job(self) -> Job:
        """Return the job of all ranks."""
        return super().job().model_copy(update={"precision": self.precision})


def main() -> None:
    """Measure each method, and print the table and its figures."""
    options = argparse.ArgumentParser(description=__doc__)
    add_out(options)
    given = options.parse_args()
    lines = ["| precision | fully_shard | measured MiB | live tensors MiB |", "|---|---|---:|---:|"]
    figures: dict[str, list[float]] = {}
    for precision, way in WAYS:
        choices = () if way is None else (Choice(technique="fully_shard", options=way),)
        case = InPrecision(DEEP, NUM_RANKS, choices, precision)
        measured, (_, live) = measured_bytes(case), predicted_bytes(case)
        how = "none" if way is None else ", ".join(f"{key}={value}" for key, value in way.items())
        lines.append(f"| {precision} | {how} | {measured / MIB:.0f} | {live / MIB:.0f} |")
        print(lines[-1], flush=True)
        figures[f"{precision} {how}"] = [round(measured / MIB), round(live / MIB)]
    file_result(given.out, "shards-memory", "What ways of sharing a model out leave", "\n".join(lines), threads=1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
