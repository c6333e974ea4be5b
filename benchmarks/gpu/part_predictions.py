"""Peaks and times of the job, by hand and as planned, beside what is predicted of them, on the processor.

What was planned is predicted by its plan. A setting by hand is predicted as any recorded training
(`benchmarks/gpu/compare.py`), and its time as `benchmarks/plan_time_gpu.py` does, which hold the recording to the same
bounds on a machine without a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import warnings

import torch
import transformers
from benchmarks.gpu.cases import Case
from benchmarks.gpu.part_job import WARM_STEPS, is_by_hand, seconds_of, setting_of
from benchmarks.gpu.parts import ROOT, Row, Task

sys.path.insert(0, str(ROOT / "benchmarks"))
MOST_OFF, MEDIAN_OFF, NINE_IN_TEN_OFF = 0.03, 0.15, 0.35  # of a peak; of times


def run_part(task: Task) -> None:
    planned = [row for row in task.recorded if row["kind"] == "planned"]
    for row in planned:
        judge_planned(task, row)
    by_hand = [row for row in task.recorded if is_by_hand(row) and row["status"] == "ok"]
    if task.is_tiny:
        task.not_reached("settings by hand: a processor has no peaks to compare")
        return
    judge_by_hand(task, by_hand)


def judge_planned(task: Task, row: Row) -> None:
    name = f"{row['limit_bytes'] >> 30} GiB: {row['choices']}"
    if (peak := row["predicted_allocated"]) is not None:
        share = peak["likely_bytes"] / row["peak"] - 1 if row["peak"] else 0.0
        task.check(f"{name}, peak", f"{share:+.2%} of {row['peak'] / 2**20:,.0f} MiB, predicted", f"{MOST_OFF:.0%}",
                   task.is_tiny or abs(share) <= MOST_OFF)  # fmt: skip
    if (duration := row["predicted_seconds"]) is not None:
        seconds = statistics.median(row["step_seconds"][WARM_STEPS:])
        low, high = duration["low_seconds"], duration["high_seconds"]
        task.check(f"{name}, time", f"{seconds:.3f} s, predicted {duration['likely_seconds']:.3f} s",
                   f"{low:.3f} to {high:.3f} s", task.is_tiny or low <= seconds <= high)  # fmt: skip


def judge_by_hand(task: Task, rows: list[Row]) -> None:
    """Predict the settings at the same time, as many as there are cores, the quick ones first."""
    rows = sorted(rows, key=lambda row: row["case"]["accumulation"])
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # of the processes: no card is needed
    found: dict[str, tuple[float, float, float]] = {}
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0)), settle) as pool:
        waiting = {row["id"]: pool.apply_async(predicted, (row, task.header)) for row in rows}
        for name, result in waiting.items():
            try:
                found[name] = result.get(max(task.seconds_left - 2, 0.1))
            except multiprocessing.TimeoutError:
                task.not_reached(f"the prediction of {name}")
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "seconds": []}
    for row in rows:
        if row["id"] not in found:
            continue
        measured = (row["peak_allocated_bytes"], row["peak_reserved_bytes"], seconds_of(row))
        off = [ours / theirs - 1 for ours, theirs in zip(found[row["id"]], measured, strict=True)]
        for name, share in zip(errors, off, strict=True):
            errors[name].append(abs(share))
        said = setting_of(Case.from_dict(row["case"]))
        task.say({"id": f"predicted:{row['id']}", "kind": "predicted", "off": [round(share, 4) for share in off]})
        task.check(f"by hand, {said}", f"peaks {off[0]:+.2%}, {off[1]:+.2%}, time {off[2]:+.1%}",
                   f"peaks {MOST_OFF:.0%}", max(abs(off[0]), abs(off[1])) <= MOST_OFF)  # fmt: skip
    if times := sorted(errors["seconds"]):
        ninth = times[-(-9 * len(times) // 10) - 1]
        task.check("by hand, times", f"median {statistics.median(times):.1%}, nine in ten {ninth:.1%}",
                   f"{MEDIAN_OFF:.0%}, {NINE_IN_TEN_OFF:.0%}",
                   statistics.median(times) <= MEDIAN_OFF and ninth <= NINE_IN_TEN_OFF)  # fmt: skip


def settle() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()


def predicted(row: Row, header: Row) -> tuple[float, float, float]:
    """Allocated and reserved bytes, and seconds."""
    from benchmarks.gpu import compare

    import plan_time_gpu

    found = compare.predict(Case.from_dict(row["case"]), header, row["before_allocated_bytes"] or 0)
    (seconds,) = plan_time_gpu.predict(plan_time_gpu.by_hand_row(row, header).task)
    return found.peak_allocated_bytes, found.peak_reserved_bytes, seconds
